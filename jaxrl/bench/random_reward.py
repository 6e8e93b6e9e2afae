"""The task of `bench shared-prefix`: a text is gone on with, and what comes back is worth a random number."""

import random


async def rollout(task, chat):
    await chat.complete(task["prompt"])
    return random.random()
