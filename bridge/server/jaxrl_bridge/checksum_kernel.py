"""The checksums of many tensors on a GPU in one kernel, where PyTorch would take several for each."""

import torch
import triton
import triton.language as tl

BLOCK = 4096  # words at a time
PROGRAMS = 64  # for each tensor


@triton.jit
def _kernel(addresses, lengths, totals, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr):
    tensor, program = tl.program_id(0), tl.program_id(1)
    words = tl.load(addresses + tensor).to(tl.pointer_type(tl.int32))
    length = tl.load(lengths + tensor)
    within = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.int32)
    for begin in range(program * BLOCK, length, PROGRAMS * BLOCK):
        index = begin + within
        total += (2 * index + 1) * tl.load(words + index, mask=index < length, other=0)
    # Terms wrap around at 32 bits and sums are exact modulo 2^32, so their order is of no matter.
    tl.atomic_add(totals + tensor, tl.sum(total.to(tl.int64), axis=0))


def checksums(tensors: list[torch.Tensor]) -> torch.Tensor:
    """[len(tensors)] int64 on their device, equal to `checksum` modulo 2^32. Contiguous tensors of whole words, at multiples of 4 bytes."""
    device = tensors[0].device
    addresses = torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.int64).to(device, non_blocking=True)
    lengths = torch.tensor([tensor.nbytes // 4 for tensor in tensors], dtype=torch.int32).to(device, non_blocking=True)
    totals = torch.zeros(len(tensors), dtype=torch.int64, device=device)
    _kernel[(len(tensors), PROGRAMS)](addresses, lengths, totals, BLOCK=BLOCK, PROGRAMS=PROGRAMS)
    return totals
