"""What a sampler refuses before it generates, whichever sampler it is."""

from collections.abc import Sequence

from jaxrl.rollout.protocol import SamplerError, SamplingParams


def admit(prompt: Sequence[int], params: SamplingParams, max_length: int, vocab_size: int) -> tuple[int, ...]:
    """The prompt's ids. Raises SamplerError if nothing can be generated from them as `params` says."""
    ids = tuple(map(int, prompt))
    if not ids:
        raise SamplerError("the prompt is empty: it needs at least one token")
    if len(ids) >= max_length:
        raise SamplerError(
            f"a prompt of {len(ids)} tokens leaves no room in sampler.max_length = {max_length}: raise it or shorten the prompt"
        )
    if min(ids) < 0 or max(ids) >= vocab_size:
        raise SamplerError(f"the prompt has token ids outside the model's vocabulary of {vocab_size}")
    if params.max_tokens < 1:
        raise SamplerError("sampling.max_tokens must be at least 1")
    if not 0 <= params.num_continued < len(ids):
        raise SamplerError(f"num_continued = {params.num_continued}: a prompt of {len(ids)} tokens does not have that many")
    return ids
