"""One of two processes with four devices each, started by test_mesh.py: `PORT PROCESS OUT LAYOUT`.

Process 0 makes the rows and decides; process 1 obeys and asks, by a signal, for the end. Process 0
then writes what the step gave to OUT; both print the order of events.
"""

import itertools
import json
import pickle
import sys
import time

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_disable_most_optimizations", True)
port, process, out, layout = sys.argv[1], int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4])
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=process)

from jax.experimental import multihost_utils  # noqa: E402
from layouts import CONFIG, make_batches, step_on  # noqa: E402

from jaxrl.packing import RowLimits  # noqa: E402
from jaxrl.packing.rows import empty_batch  # noqa: E402
from jaxrl.trainer import gather, processes  # noqa: E402
from jaxrl.trainer.processes import Action, Peers, Record  # noqa: E402

processes.POLL_SECONDS = 0.1
gather.GATHER_BYTES = 500  # so that larger leaves are gathered in pieces
results, events, gathered = [], [], []


def obey(record, batches):
    events.append(f"{record.action.name} {record.step} {record.num_batches}")
    if record.action is Action.TRAIN:
        results.append(step_on(layout, batches))
    if record.action is Action.PUBLISH and not gathered:
        gathered.append(gather.gather(results[0]["after"]))


def lead():
    """Trains once, checkpoints, then publishes until someone asks for the end."""
    heard = []
    with Peers(heard.append) as peers:
        for action in itertools.chain((Action.TRAIN, Action.CHECKPOINT), itertools.repeat(Action.PUBLISH)):
            action = Action.STOP if heard else action
            batches = make_batches() if action is Action.TRAIN else []
            record = Record(action, 7, len(batches))
            peers.send(record, batches)
            obey(record, batches)
            if action is Action.STOP:
                return heard
            time.sleep(0.01)


def follow():
    template = empty_batch(RowLimits.from_config(CONFIG.packing), CONFIG.packing.rows)
    with Peers() as peers:
        while not events or not events[-1].startswith("STOP"):
            obey(*peers.receive(template))
            if len(events) == 3:
                peers.signalled("SIGTERM")


heard = lead() if process == 0 else follow()
whole = multihost_utils.process_allgather(results[0], tiled=True)
if process == 0:
    with open(out, "wb") as file:
        pickle.dump((whole, gathered[0], heard), file)
else:
    assert gathered == [None]
print(json.dumps([events[:3], events[-1], len(events)]), flush=True)
jax.distributed.shutdown()
