"""An environment that does what its task row says."""

import asyncio
import os
import re
import subprocess
import sys

from jaxrl.rollout.environment import Outcome


def tasks(split):
    return [{"do": "answer"}] if split == "train" else []


async def rollout(task, chat):
    for _ in range(task.get("turns", 1)):
        reply = await chat.complete(task.get("text", "x"), max_tokens=task.get("max_tokens"))
    if "mark" in task:  # each run of the rollout that gets here leaves a line
        with open(task["mark"], "a") as file:
            file.write(f"{os.getpid()}\n")
    if "then" in task:
        reply = await chat.complete(task["then"])
    match task["do"]:
        case "answer":
            return Outcome(float(len(reply.text)), metrics={"letters": len(reply.text)})
        case "jax":
            return float("jax" in sys.modules)
        case "raise":
            raise KeyError("no such tool")
        case "nan":
            return float("nan")
        case "text":
            return "1.0"
        case "wait":
            await asyncio.sleep(1e6)
        case "stubborn":
            while True:
                try:
                    await asyncio.sleep(1e6)
                except asyncio.CancelledError:
                    pass
        case "spin":
            while True:
                pass
        case "spin in a task":
            await asyncio.create_task(spin())
        case "regex":
            re.match(r"(a+)+$", "a" * 100 + "b")
        case "tools":  # one in this process group, one that detached itself, one whose parent is gone
            tools = ["sleep 300 & echo $!", "setsid sleep 300 & echo $!", "(setsid sh -c 'sleep 300 & echo $!; sleep 300' &)"]
            for tool in tools:
                shell = subprocess.Popen(["sh", "-c", tool], stdout=subprocess.PIPE, text=True)
                with open(task["mark"], "a") as file:
                    file.write(shell.stdout.readline())
            re.match(r"(a+)+$", "a" * 100 + "b")
        case "exit":
            sys.exit(3)
        case "die":
            os._exit(3)
        case "forks":
            left, right = chat.fork(), chat.fork()
            await asyncio.gather(right.complete("r"), left.complete("l"))
            return 1.0


async def spin():
    await asyncio.sleep(0)
    while True:
        pass


def not_async(task, chat):
    return 1.0
