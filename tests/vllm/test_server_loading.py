"""How a worker loads again what it has loaded once: copies recorded under vLLM's loader, and checksums on the way, in vLLM's own environment."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".vllm" / "bin" / "python"

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="needs vLLM's environment: make vllm-env")

MODEL = """
import torch
from jaxrl_bridge.copies import Recorder

class Model(torch.nn.Module):
    '''Loads as vLLM's models do: parts of a fused matrix, a padded embedding, a slice of what came.'''

    def __init__(self, added=0.0):
        super().__init__()
        make = lambda *shape: torch.nn.Parameter(torch.full(shape, -1.0), requires_grad=False)
        self.qkv, self.embedding, self.bias, self.shard = make(12, 8), make(16, 8), make(12), make(5, 4)
        self.added = added

    def load_weights(self, weights):
        loaded = set()
        for name, tensor in weights:
            if name in "qkv":
                self.qkv.data.narrow(0, 4 * "qkv".index(name), 4).copy_(tensor)
            elif name == "embedding":
                self.embedding[: len(tensor)].data.copy_(tensor)
                self.embedding[len(tensor) :].data.fill_(0)
            elif name == "bias":
                self.bias.data.copy_(tensor + self.added if self.added else tensor.view(-1))
            elif name == "shard":
                self.shard.data.copy_(tensor.narrow(1, 2, 4))
            loaded.add(name)
        return loaded

NAMES = [*"qkv", "embedding", "bias", "shard"]

def tensors(seed):
    area, at, out = torch.randn(2000, generator=torch.Generator().manual_seed(seed)), 3, []
    for shape in [(4, 8)] * 3 + [(13, 8), (12,), (5, 9)]:
        size = torch.Size(shape).numel()
        out.append(area[at : at + size].view(shape))
        at += size + 4
    return out

def recorded(model, weights):
    recorder = Recorder(weights)
    with recorder:
        loaded = model.load_weights(zip(NAMES, weights))
    return recorder.copies(model, loaded)
"""


def in_vllms_python(script: str, **environment: str) -> str:
    done = subprocess.run(
        [PYTHON, "-c", MODEL + "with torch.inference_mode():\n" + "".join(f"    {line}\n" for line in script.splitlines())],
        capture_output=True,
        text=True,
        timeout=120,
        env={"PYTHONPATH": str(ROOT / "bridge" / "server"), "PATH": "/usr/bin:/bin", **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_recorded_copies_do_what_loading_does():
    in_vllms_python("""
model, again = Model(), tensors(1)
copies = recorded(model, tensors(0))
assert copies.loaded == set(NAMES) and copies.fit(model)
copies.repeat(again)
fresh = Model()
fresh.load_weights(zip(NAMES, again))
assert all(torch.equal(x, y) for x, y in zip(model.parameters(), fresh.parameters()))
model.bias = torch.nn.Parameter(torch.ones(12), requires_grad=False)
assert not copies.fit(model)
""")


def test_what_is_not_a_copy_is_left_to_vllm():
    in_vllms_python("""
assert recorded(Model(added=1.0), tensors(0)) is None
assert recorded(Model().half(), tensors(0)) is None
""")


def test_checksums_name_every_tensor():
    in_vllms_python("""
from jaxrl_bridge.checksum import checksums
area = torch.arange(100, dtype=torch.int32).view(torch.uint8)
assert checksums([area[4:12], area[8:17]]) == [1 * 1 + 3 * 2, 1 * 2 + 3 * 3 + 5 * 4]
""")
