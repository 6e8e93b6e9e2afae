"""kill -9 at random moments. sync: the run ends bit for bit like one that was never killed. async and
inflight: nothing is lost, nothing is trained on twice, what ran is continued, and answers get no shorter. Prints what it
found; fails on the first lie.

python tests/proofs/proof_resume.py [SYNC_KILLS ASYNC_KILLS]
"""

import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "resume"))

from accounting import check_async, check_lengths, check_same_tokens, check_sync, run_to_the_end, stop_by_signal  # noqa: E402


def main() -> None:
    sync_kills, async_kills = map(int, sys.argv[1:] or (30, 10))
    began = time.monotonic()
    base = Path(tempfile.mkdtemp(prefix="resume-"))
    say("sync", **check_sync(base / "sync", sync_kills, steps=120, rng=np.random.default_rng(0)))
    elsewhere = ("--pipeline.steps", "126", "--mesh.fsdp", "2", "--mesh.tensor", "2")
    say("another mesh", **run_to_the_end(base / "sync" / "killed", *elsewhere, devices=4))
    say("SIGTERM", **stop_by_signal(base / "stopped", steps=60, rng=np.random.default_rng(1)))
    for mode, *options in (("async",), ("inflight",), ("async", "--optimizer.lr", "0")):
        folder = base / "-".join((mode, *options))
        figures = check_async(folder, async_kills, mode, 60, np.random.default_rng(2), *options)
        if options:  # all versions sample alike, so what is continued has to come out as it would have
            figures |= check_same_tokens(folder, mode, 60, *options)
        say(" ".join((mode, *options)), **figures)
    say("lengths", **check_lengths(base / "lengths", 2 * async_kills, 30, np.random.default_rng(3)))
    shutil.rmtree(base)
    say("done", seconds=round(time.monotonic() - began))


def say(what: str, **figures) -> None:
    print(json.dumps({"proof": what} | figures), flush=True)


if __name__ == "__main__":
    main()
