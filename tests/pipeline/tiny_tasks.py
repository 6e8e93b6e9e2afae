"""Tasks for whole runs of a tiny model: what it says is worth its share of the token "7"."""

import asyncio
import time


def tasks(split):
    return [{"id": i, "prompt": f"{i}="} for i in range(64 if split == "train" else 4)]


async def sevens(task, chat):
    reply = await chat.complete(task["prompt"])
    return reply.text.count("7") / 6


async def two_turns(task, chat):
    """Its history forks: two continuations of one prefix."""
    await chat.complete(task["prompt"], max_tokens=2)
    other = chat.fork()
    first, second = await asyncio.gather(chat.complete("+"), other.complete("1"))
    return (first.text + second.text).count("7") / 12


async def troubled(task, chat):
    """Every fourth task raises, every eighth never ends, one blocks its process."""
    reply = await chat.complete(task["prompt"])
    if task["id"] % 4 == 1:
        raise RuntimeError("the grader is out of order")
    if task["id"] % 8 == 2:
        await asyncio.sleep(3600)
    if task["id"] == 3:
        time.sleep(3600)
    return reply.text.count("7") / 6


async def broken(task, chat):
    raise RuntimeError(f"no task works, {task['id']} neither")


async def overflowing(task, chat):
    reply = await chat.complete(task["prompt"])
    return 1e30 * len(reply.text)
