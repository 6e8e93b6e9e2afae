"""The checksum of a tensor: sum over its little-endian 32-bit words w of (2 i + 1) w[i], modulo 2^32.

It depends on the order of the words, and every term is 32-bit wrap-around arithmetic, so it runs where the tensor is.
"""

import torch

PIECE = 1 << 23  # words summed at a time: what is needed beside the tensor is two buffers of 32 MiB


def checksums(tensors: list[torch.Tensor]) -> list[int]:
    """The checksum of every tensor, integers from 0 to 2^32 - 1. Waits for the device once."""
    if tensors[0].is_cuda and all(tensor.nbytes % 4 == 0 and tensor.data_ptr() % 4 == 0 for tensor in tensors):
        from jaxrl_bridge import checksum_kernel  # needs Triton, which vLLM brings where there is a GPU

        totals = checksum_kernel.checksums(tensors)
    else:
        totals = torch.stack([checksum(tensor) for tensor in tensors])
    return [total & 0xFFFFFFFF for total in totals.tolist()]


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """The checksum, equal modulo 2^32, as an int64 scalar on the tensor's device (no wait for the device).

    The tensor must be contiguous. Bytes past the last whole word are padded with zeros.
    """
    data = tensor.reshape(-1).view(torch.uint8)
    whole = data.numel() // 4 * 4
    pieces = [data[:whole].view(torch.int32)] if whole and data.data_ptr() % 4 == 0 else []
    if whole and not pieces:
        pieces = [data[:whole].clone().view(torch.int32)]
    if whole < data.numel():
        tail = torch.zeros(4, dtype=torch.uint8, device=data.device)
        tail[: data.numel() - whole] = data[whole:]
        pieces.append(tail.view(torch.int32))
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    start = 0
    for words in pieces:
        for piece in words.split(PIECE):
            odd = torch.arange(piece.numel(), dtype=torch.int32, device=data.device)
            odd.mul_(2).add_(_signed(2 * start + 1))
            total += odd.mul_(piece).sum(dtype=torch.int64)
            start += piece.numel()
    return total


def _signed(number: int) -> int:
    number &= 0xFFFFFFFF
    return number - (1 << 32) if number >= 1 << 31 else number
