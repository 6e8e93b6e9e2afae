"""jaxrl.train with a sampler that hands out its tokens one by one, so that kills meet running generations.

CONFIG [--KEY VALUE ...]; slow.json beside CONFIG says how: `seconds` between two tokens of an answer; `fresh`: every start
draws other random numbers; `forgets`: nothing of a running episode survives (what must fail).
"""

import asyncio
import json
import os
import sys
from contextlib import aclosing
from dataclasses import fields, replace
from pathlib import Path

import jaxrl.samplers
from jaxrl.pipeline.journal import Journal
from jaxrl.rollout.protocol import Completion, SampledTokens
from jaxrl.train import main


class Slow:
    def __init__(self, sampler, seconds: float, salt: int):
        self.sampler, self.seconds, self.salt = sampler, seconds, salt
        self.publish, self.load, self.close = sampler.publish, sampler.load, sampler.close
        self.generate = sampler.generate  # evaluations

    async def stream(self, prompt_ids, params, priority=0):
        params = replace(params, seed=params.seed ^ self.salt)
        async with aclosing(self.sampler.stream(prompt_ids, params, priority)) as parts:
            async for part in parts:
                last = len(part.tokens.ids) - 1
                for i in range(last + 1):
                    await asyncio.sleep(self.seconds)
                    one = SampledTokens(*(getattr(part.tokens, f.name)[i : i + 1] for f in fields(SampledTokens)))
                    yield Completion(one, part.finish_reason if i == last else None)


if __name__ == "__main__":
    how = json.loads(Path(sys.argv[1]).with_name("slow.json").read_text())
    salt = int.from_bytes(os.urandom(4)) if how["fresh"] else 0
    make_sampler = jaxrl.samplers.make_sampler

    async def make_slow(*arguments):
        return Slow(await make_sampler(*arguments), how["seconds"], salt)

    jaxrl.samplers.make_sampler = make_slow
    if how["forgets"]:
        Journal.partials = lambda self, wanted: {}
    sys.exit(main(sys.argv[1:]))
