"""The chat is exact to the token: sampled ids stay, template increments follow, rewritten histories fork."""

import asyncio
import random
from dataclasses import dataclass, field

import pytest
from scripted import save_tokenizer

from jaxrl.rollout.chat import Answer, Book, Call, Conversation, LengthLimit, PromptTooLong
from jaxrl.rollout.tokenizer import ChatTemplateError, Tokenizer, load_tokenizer


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("tokenizers")
    return {name: load_tokenizer(save_tokenizer(folder / str(name), name)) for name in ("qwen3", "smollm2", None)}


@dataclass
class Policy:
    """Answers with the next of `answers`: text (encoded), or ids with a finish reason."""

    tokenizer: Tokenizer
    answers: list
    calls: list[Call] = field(default_factory=list)
    given: list[list[int]] = field(default_factory=list)

    async def __call__(self, call: Call) -> Answer:
        answer = self.answers[len(self.calls)]
        self.calls.append(call)
        ids, reason = answer if isinstance(answer, tuple) else (self.tokenizer.encode(answer, start=True), "stop")
        self.given.append(ids)
        return Answer(ids, reason)


def converse(tokenizer: Tokenizer, answers: list, limit: int = 10_000) -> tuple[Conversation, Book, Policy]:
    policy = Policy(tokenizer, answers)
    eos = {tokenizer.hf.convert_tokens_to_ids(t) for t in ("<|im_end|>", "<|endoftext|>")}
    book = Book(tokenizer, policy, LengthLimit(limit, "packing.row_length"), 100, frozenset(eos))
    return Conversation(book), book, policy


def ids_of(line) -> list[int]:
    return [i for piece in line.pieces for i in piece.ids]


def check_exact(book: Book, policy: Policy) -> None:
    """Each call's prompt and answer are a prefix of exactly one line's own part, and nothing else is in the lines."""
    seen = {}
    for line in book.lines:
        offset = 0
        for i, piece in enumerate(line.pieces):
            if piece.call is not None and i >= line.inherited:
                assert piece.call not in seen
                seen[piece.call] = ids_of(line)[:offset], piece.ids
            offset += len(piece.ids)
    assert len(seen) == len(policy.calls)
    for call, given in zip(policy.calls, policy.given, strict=True):
        assert seen[call.key] == (call.prompt_ids, given)


@pytest.mark.parametrize("template", ["smollm2", "qwen3"])
def test_a_single_turn_is_the_template_and_what_was_sampled(tokenizers, template):
    tokenizer = tokenizers[template]
    chat, book, policy = converse(tokenizer, ["four<|im_end|>"])
    reply = asyncio.run(chat.ask("what is two plus two"))
    assert (reply.text, reply.finish_reason, reply.num_tokens) == ("four", "stop", len(policy.given[0]))
    expected = tokenizer.hf.apply_chat_template(chat.messages[:1], tokenize=True, add_generation_prompt=True, return_dict=False)
    assert policy.calls[0].prompt_ids == expected
    assert ids_of(book.lines[0]) == expected + policy.given[0]


@pytest.mark.parametrize("template", ["smollm2", "qwen3"])
def test_many_turns_of_ids_no_encoder_would_choose(tokenizers, template):
    """Random ids: invalid UTF-8, split words, special tokens amid the text. One line, and in it every id as sampled."""
    tokenizer = tokenizers[template]
    draw = random.Random(template)
    end = tokenizer.hf.convert_tokens_to_ids("<|im_end|>")
    start = tokenizer.hf.convert_tokens_to_ids("<|im_start|>")
    think = tokenizer.hf.convert_tokens_to_ids("<think>")  # the last but one: with it Qwen3 rewrites
    usable = [i for i in range(3, think) if tokenizer.decode([i]).strip()]
    answers = []
    for turn in range(30):
        # Qwen3 strips newlines at the start of an answer: begin and end with visible text.
        ids = [draw.choice(usable), *(draw.randrange(3, think) for _ in range(draw.randrange(12))), draw.choice(usable)]
        if turn % 5 == 4:
            ids.insert(1, start)
        answers.append((ids, "length") if turn % 3 == 2 else ([*ids, end], "stop"))
    chat, book, policy = converse(tokenizer, answers)

    async def talk():
        for turn in range(30):
            await chat.ask(f"what is {turn}")

    asyncio.run(talk())
    assert len(book.lines) == 1 and book.num_rewrites == 0 and book.num_calls == 30 and book.num_truncated == 10
    check_exact(book, policy)
    for before, given, after in zip(policy.calls, policy.given, policy.calls[1:], strict=False):
        assert after.prompt_ids[: len(before.prompt_ids) + len(given)] == before.prompt_ids + given
    # The ids differ from what encoding the text again would give: the test can fail.
    assert tokenizer.encode(tokenizer.render(chat.messages, generate=False), start=True) != ids_of(book.lines[0])


def test_the_end_of_turn_token_is_neither_doubled_nor_lost(tokenizers):
    tokenizer = tokenizers["smollm2"]
    end = tokenizer.hf.convert_tokens_to_ids("<|im_end|>")
    cut = tokenizer.encode("thinks ag", start=True)
    chat, book, policy = converse(tokenizer, ["four<|im_end|>", (cut, "length"), "five<|im_end|>"])

    async def talk():
        for question in ("one", "two", "three"):
            await chat.ask(question)

    asyncio.run(talk())
    assert tokenizer.decode(ids_of(book.lines[0]), special=True) + "\n" == tokenizer.render(chat.messages, generate=False)
    inherited = len(policy.calls[1].prompt_ids)
    assert policy.calls[2].prompt_ids[inherited : inherited + len(cut) + 1] == [*cut, end]  # the template ends the cut turn
    end_sampled = [piece.ids[-1] == end for piece in book.lines[0].pieces if piece.call]
    assert end_sampled == [True, False, True]


def test_qwen3_drops_thoughts_and_the_history_forks(tokenizers):
    tokenizer = tokenizers["qwen3"]
    first = "<think>\nthirteen plus four\n</think>\n\nthe answer<|im_end|>"
    chat, book, policy = converse(
        tokenizer, [first, "<think>\nagain\n</think>\n\nfour<|im_end|>", "plain<|im_end|>", "last<|im_end|>"]
    )

    async def talk():
        for question in ("one", "two", "three", "four"):
            await chat.ask(question)

    asyncio.run(talk())
    check_exact(book, policy)
    # Turns 2 and 3 follow a dropped thought; turn 4 follows a plain answer, which stays.
    assert book.num_rewrites == 2 and len(book.lines) == 3
    for call in policy.calls[1:]:
        assert "thirteen plus four" not in tokenizer.decode(call.prompt_ids)
    third = policy.calls[2].prompt_ids
    assert tokenizer.decode(third, special=True) == tokenizer.render(chat.messages[:5], generate=True)
    # A new line starts from what still holds: the prompt up to the rewritten answer, to the token.
    assert third[: len(policy.calls[1].prompt_ids)] == policy.calls[1].prompt_ids
    assert [line.inherited for line in book.lines] == [0, 1, 2]


def test_qwen3_keeps_thoughts_while_tools_answer(tokenizers):
    chat, book, policy = converse(
        tokenizers["qwen3"], ["<think>\na tool\n</think>\n\ncalls<|im_end|>", "<think>\nso\n</think>\n\nfour<|im_end|>"]
    )

    async def talk():
        await chat.ask("one")
        await chat.ask([{"role": "tool", "content": "the result"}])

    asyncio.run(talk())
    check_exact(book, policy)
    assert book.num_rewrites == 0 and len(book.lines) == 1


def test_an_answer_that_ends_with_another_token_keeps_its_ids(tokenizers):
    tokenizer = tokenizers["smollm2"]
    split = [tokenizer.hf.convert_tokens_to_ids(c) for c in "four"]  # not as the encoder has it
    other = tokenizer.hf.convert_tokens_to_ids("<|endoftext|>")
    chat, book, policy = converse(tokenizer, [([*split, other], "stop"), "five<|im_end|>"])

    async def talk():
        await chat.ask("one")
        await chat.ask("two")

    asyncio.run(talk())
    check_exact(book, policy)
    assert book.num_rewrites == 1
    prompt, length = policy.calls[1].prompt_ids, len(policy.calls[0].prompt_ids)
    assert other not in prompt and prompt[length : length + 4] == split
    assert tokenizer.decode(prompt, special=True) == tokenizer.render(chat.messages[:3], generate=True)


def test_edited_messages_fork_and_what_is_rendered_counts(tokenizers):
    tokenizer = tokenizers["smollm2"]
    chat, book, policy = converse(tokenizer, ["four<|im_end|>", "five<|im_end|>", "six<|im_end|>"])

    async def talk():
        await chat.ask("one")
        await chat.ask("two")
        chat.messages[1]["content"] = "thirteen"
        await chat.ask("three")

    asyncio.run(talk())
    check_exact(book, policy)
    assert book.num_rewrites == 1
    assert tokenizer.decode(policy.calls[2].prompt_ids, special=True) == tokenizer.render(chat.messages[:5], generate=True)


def test_forked_chats_share_their_history_and_train_it_once(tokenizers):
    chat, book, policy = converse(tokenizers["smollm2"], ["one<|im_end|>", "two<|im_end|>", "three<|im_end|>"])

    async def talk():
        await chat.ask("first")
        fork = chat.fork()
        idle = chat.fork()
        await fork.ask("left")
        await chat.ask("right")
        assert fork.messages[:2] == chat.messages[:2] and idle.messages == chat.messages[:2]
        assert fork.messages[2:] != chat.messages[2:]

    asyncio.run(talk())
    check_exact(book, policy)
    assert [call.key for call in policy.calls] == [((), 0), ((0,), 0), ((), 1)]
    assert book.num_rewrites == 0
    assert [len(line.pieces) > line.inherited for line in book.lines] == [True, True, False]


def test_complete_needs_no_template(tokenizers):
    chat, book, policy = converse(tokenizers[None], ["four", (tokenizers[None].encode(" five", start=True), "length")])

    async def talk():
        reply = await chat.complete("thirteen plus ")
        assert reply.text == "four"
        assert (await chat.complete(" plus")).text == " five"
        with pytest.raises(ChatTemplateError, match="model.tokenizer"):
            await chat.ask("hello")

    asyncio.run(talk())
    check_exact(book, policy)
    assert tokenizers[None].decode(ids_of(book.lines[0])) == "thirteen plus four plus five"
    with pytest.raises(ValueError, match="needs text"):
        asyncio.run(converse(tokenizers[None], [])[0].complete())


def test_a_prompt_without_room_is_refused_and_leaves_no_trace(tokenizers):
    chat, book, policy = converse(tokenizers["smollm2"], ["four<|im_end|>", "five<|im_end|>"], limit=100)

    async def talk():
        await chat.ask("one")
        before = list(chat.messages)
        with pytest.raises(PromptTooLong, match=r"prompt has \d+ tokens and packing.row_length = 100"):
            await chat.ask("what is " * 80)
        assert chat.messages == before
        await chat.ask("two")

    asyncio.run(talk())
    check_exact(book, policy)
    assert book.num_rewrites == 0 and len(book.lines) == 1
    assert policy.calls[1].max_tokens == 100 - len(policy.calls[1].prompt_ids)


def test_one_call_at_a_time(tokenizers):
    chat, _, _ = converse(tokenizers["smollm2"], [])
    chat._busy = True
    with pytest.raises(RuntimeError, match="fork"):
        asyncio.run(chat.ask("one"))
