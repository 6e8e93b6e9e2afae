"""One of two processes with four devices each, started by test_mesh.py: `PORT PROCESS OUT LAYOUT`.

Process 0 makes the rows and decides; process 1 obeys and asks, by a signal, for the end. Process 0
then writes what the step gave to OUT and prints the order of events.
"""

import json
import pickle
import sys

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
from jaxrl.trainer.processes import Action, Flag, Record, exchange_flags, follow, send  # noqa: E402

results, events = [], []


def obey(record, batches):
    events.append(f"{record.action.name} {record.step} {record.num_batches}")
    if record.action is Action.TRAIN:
        results.append(multihost_utils.process_allgather(step_on(layout, batches), tiled=True))


def lead():
    """Trains once, then goes on to checkpoint and publish until someone asks for the end."""
    for action in (Action.TRAIN, Action.CHECKPOINT, Action.PUBLISH, Action.PUBLISH):
        if exchange_flags(Flag.NONE) & Flag.SIGNAL:
            action = Action.STOP
        batches = make_batches() if action is Action.TRAIN else []
        record = Record(action, 7, len(batches))
        send(record, batches)
        obey(record, batches)
        if action is Action.STOP:
            return


if process == 0:
    lead()
    with open(out, "wb") as file:
        pickle.dump(results[0], file)
else:
    template = empty_batch(RowLimits.from_config(CONFIG.packing), CONFIG.packing.rows)
    follow(obey, lambda: Flag.SIGNAL if len(events) == 2 else Flag.NONE, template)
print(json.dumps(events), flush=True)
jax.distributed.shutdown()
