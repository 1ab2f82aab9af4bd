"""The tokenizer from both kinds of model file, with transformers as oracle."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.errors import ConfigError, InvalidRequestError
from router.gguf_tokenizer import FAMILIES
from router.tokenizer import Tokenizer, truncated
from tests.router import tiny_tokenizers as tiny

TEXTS = [
    "",
    "a",
    " leading and trailing ",
    "12345 1 22 333\n\n4444\t55  6",
    "x =  12;\r\n\r\n\ty",
    "isn't ISN'T we'Ve 's",
    "안녕하세요 中文字符 Привет ไทย عربي",
    "👩‍👩‍👧‍👦🏳️‍🌈 e\u0301 é \u00a0\u3000 x\ufeff\ufffd\x00\U0010ffff",
    "<|begin|>user\nhi<|end|>\n<think> <|unknown|> < |end|>",
    "½ ² ١٢٣ Ⅷ",
    "\n\n\n   \n a    b",
]
PIECES = ["a", "The", " ", "  ", "\n", "\r\n", "\t", "1", "23", "é", "e\u0301", "한", "👍", "\u200d", "'s", "'LL"]
PIECES += [".", "(", "٣", "ſ", "<|end|>", "<think>"]


@pytest.fixture(scope="module", params=["gpt-2", "smollm", "llama-bpe", "qwen2"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf") / family
    return tiny.write_hf_folder(folder, tiny.byte_level(family), chat_template=tiny.CHAT_TEMPLATE)


@pytest.fixture(scope="module")
def oracle(folder: Path):
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.fixture(scope="module", params=["folder", "gguf"])
def tokenizer(request: pytest.FixtureRequest, family: str, folder: Path) -> Tokenizer:
    if request.param == "folder":
        return Tokenizer.load(folder)
    path = tiny.write_gguf(
        folder / "model.gguf", tiny.byte_level(family), family, add_bos_token=False, chat_template=tiny.CHAT_TEMPLATE
    )
    return Tokenizer.load(path)


def test_ids_and_text_are_those_of_transformers(tokenizer: Tokenizer, oracle) -> None:
    rng = random.Random(7)
    for text in TEXTS + ["".join(rng.choices(PIECES, k=rng.randint(1, 20))) for _ in range(300)]:
        ids = tokenizer.encode(text, add_special_tokens=True)
        assert ids == oracle.encode(text), repr(text)
        assert tokenizer.decode(ids) == oracle.decode(ids, skip_special_tokens=True)
        assert tokenizer.decode(ids, skip_special_tokens=False) == oracle.decode(ids)


def test_chat_is_that_of_transformers(tokenizer: Tokenizer, oracle) -> None:
    messages = [{"role": "system", "content": "Be <b>."}, {"role": "user", "content": "안녕 'x'\n"}]
    for generate in (True, False):
        expected = oracle.apply_chat_template(messages, tokenize=False, add_generation_prompt=generate)
        assert tokenizer.render_chat(messages, add_generation_prompt=generate) == expected


def test_numbers_of_the_vocabulary(tokenizer: Tokenizer, oracle) -> None:
    assert tokenizer.vocab_size == len(oracle) > 400
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)
    assert tokenizer.has_chat_template


def test_control_tokens_are_skipped_and_user_tokens_are_not(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|begin|>a<think>b<|end|>", add_special_tokens=False)
    assert ids[0] == 0
    assert ids[-1] == 1
    assert tokenizer.decode(ids) == "a<think>b"


def test_a_lone_surrogate_is_the_clients_fault(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="surrogate"):
        tokenizer.encode(json.loads(r'"\ud83d"'), add_special_tokens=False)


def test_threads_share_one_tokenizer(tokenizer: Tokenizer) -> None:
    texts = [text * 20 for text in TEXTS] * 4
    expected = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda text: tokenizer.encode(text, add_special_tokens=False), texts)) == expected
        assert list(pool.map(tokenizer.decode, expected)) == [tokenizer.decode(ids) for ids in expected]


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text())
def test_text_comes_back(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    assert _shared(tmp_path_factory).decode(_shared(tmp_path_factory).encode(text, add_special_tokens=False)) == text


_loaded: list[Tokenizer] = []


def _shared(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    if not _loaded:
        path = tiny.write_gguf(tmp_path_factory.mktemp("gguf") / "model.gguf", tiny.byte_level())
        _loaded.append(Tokenizer.load(path))
    return _loaded[0]


# ── BOS and EOS ───────────────────────────────────────────────────────────────────────────────────


BOS_TEXTS = ["", "The fox", "<|begin|>The fox", "<|begin|>", "<|begin|><|begin|>x"]
BOS_TEXTS += [" <|begin|>x", "x<|begin|>", "<|end|>"]


def load_with_ends(tmp_path: Path, kind: str, bos: bool, eos: bool, chat_template: str) -> tuple[Tokenizer, Any]:
    """A tokenizer that puts these ends around a text, from either kind of file, and that of transformers."""
    from transformers import PreTrainedTokenizerFast

    backend = tiny.byte_level()
    ends = {"add_bos_token": bos, "add_eos_token": eos}
    path = tiny.write_gguf(tmp_path / "model.gguf", backend, **ends, chat_template=chat_template)
    tiny.put_ends(backend, bos, eos)
    folder = tiny.write_hf_folder(tmp_path / "hf", backend, chat_template=chat_template)
    return Tokenizer.load(folder if kind == "folder" else path), PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.mark.parametrize("kind", ["folder", "gguf"])
@pytest.mark.parametrize("adds", [(True, False), (True, True), (False, True), (False, False)], ids=str)
def test_bos_is_never_doubled(tmp_path: Path, kind: str, adds: tuple[bool, bool]) -> None:
    """transformers puts its BOS before any text, also one that begins with BOS; that one is taken off here
    before it is asked.
    """
    tokenizer, oracle = load_with_ends(tmp_path, kind, *adds, tiny.CHAT_TEMPLATE)
    for text in BOS_TEXTS:
        front, back = [0] * adds[0], [1] * adds[1]
        plain = oracle.encode(text, add_special_tokens=False)
        assert tokenizer.encode(text, add_special_tokens=False) == plain
        expected = [*(front if plain[:1] != [0] else []), *plain, *back]
        assert tokenizer.encode(text, add_special_tokens=True) == expected, text
        if not (adds[0] and plain[:1] == [0]):
            assert oracle.encode(text) == expected, text


@pytest.mark.parametrize("kind", ["folder", "gguf"])
@pytest.mark.parametrize("template", [tiny.CHAT_TEMPLATE, "{{ bos_token }}{{ messages[0].content }}", "no BOS"])
def test_a_rendered_prompt_has_the_bos_of_its_template(tmp_path: Path, kind: str, template: str) -> None:
    tokenizer, oracle = load_with_ends(tmp_path, kind, True, False, template)
    for content in ("hi", "<|begin|>hi", ""):
        messages = [{"role": "user", "content": content}]
        prompt = tokenizer.render_chat(messages)
        ids = tokenizer.encode(prompt, add_special_tokens=False)
        assert ids == oracle.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        missing = [] if ids[:1] == [0] else [0]
        assert tokenizer.encode(prompt, add_special_tokens=True) == missing + ids


def test_llama3_files_that_say_nothing_get_bos_and_others_do_not(tmp_path: Path) -> None:
    for family, bos in {"llama-bpe": [0], "qwen2": [], "smollm": [], "gpt-2": []}.items():
        tokenizer = Tokenizer.load(tiny.write_gguf(tmp_path / f"{family}.gguf", tiny.byte_level(family), family))
        assert tokenizer.encode("", add_special_tokens=True) == bos, family


@pytest.mark.parametrize("said", [{}, {"add_bos_token": False}, {"add_eos_token": True}], ids=str)
def test_what_tokenizer_json_puts_around_a_text_is_final(tmp_path: Path, said: dict[str, bool]) -> None:
    from transformers import PreTrainedTokenizerFast

    backend = tiny.byte_level()
    tiny.put_ends(backend, bos=True, eos=False)
    folder = tiny.write_hf_folder(tmp_path, backend, **said)
    assert Tokenizer.load(folder).encode("", add_special_tokens=True) == [0]
    assert PreTrainedTokenizerFast.from_pretrained(folder).encode("") == [0]


# ── a limit ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("ids", "limit", "side", "bos", "expected"),
    [
        ([0, 5, 6, 7], 4, "left", 0, [0, 5, 6, 7]),
        ([0, 5, 6, 7], 3, "left", 0, [0, 6, 7]),
        ([0, 5, 6, 7], 3, "right", 0, [0, 5, 6]),
        ([0, 5, 6, 7], 1, "left", 0, [0]),
        ([0, 5, 6, 7], 0, "left", 0, []),
        ([0, 5, 6, 7], 3, "left", None, [5, 6, 7]),
        ([0, 5, 6, 7], 3, "left", 9, [5, 6, 7]),
        ([], 3, "left", 0, []),
    ],
)
def test_cut_on_the_named_side(ids: list[int], limit: int, side: Any, bos: int | None, expected: list[int]) -> None:
    before = list(ids)
    assert truncated(ids, limit, side, bos) == expected
    assert ids == before


def test_a_negative_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="-1 tokens"):
        truncated([1], -1, "left")


# ── folders ───────────────────────────────────────────────────────────────────────────────────────


def test_cutting_and_padding_of_a_training_run_are_ignored(tmp_path: Path) -> None:
    backend = tiny.byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=4)
    tokenizer = Tokenizer.load(tiny.write_hf_folder(tmp_path, backend))
    assert tokenizer.encode("a", add_special_tokens=True) == tokenizer.encode("a", add_special_tokens=False)
    assert len(tokenizer.encode("a b c d e f g h", add_special_tokens=True)) > 4


def test_where_a_folder_keeps_its_templates(tmp_path: Path) -> None:
    hello = [{"role": "user", "content": "hello"}]
    named = [{"name": "default", "template": "listed"}, {"name": "tool_use", "template": "tools"}]
    folder = tiny.write_hf_folder(tmp_path, tiny.byte_level(), chat_template=named)
    assert Tokenizer.load(folder).render_chat(hello) == "listed"
    assert Tokenizer.load(folder).render_chat(hello, tools=[{}]) == "tools"
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "legacy"}))
    assert Tokenizer.load(folder).render_chat(hello) == "legacy"
    (folder / "chat_template.jinja").write_text("newest {{ bos_token }}{{ eos_token }}")
    assert Tokenizer.load(folder).render_chat(hello) == "newest <|begin|><|end|>"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("more tools")
    assert Tokenizer.load(folder).render_chat(hello, tools=[{}]) == "more tools"


def test_special_tokens_from_the_map_and_as_objects(tmp_path: Path) -> None:
    folder = tiny.write_hf_folder(tmp_path, tiny.byte_level(), bos_token=None, eos_token={"content": "<|pad|>"})
    (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<|new|>", "eos_token": "<|end|>"}))
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.eos_token_id == 2
    assert tokenizer.bos_token_id is None, "the config's null wins over the map"


def test_no_template_is_said_to_the_client(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(tiny.write_hf_folder(tmp_path, tiny.byte_level()))
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidRequestError, match="no chat template") as caught:
        tokenizer.render_chat([{"role": "user", "content": "x"}])
    assert caught.value.param == "messages"


def test_folders_that_cannot_be_served(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no tokenizer.json"):
        Tokenizer.load(tmp_path)
    with pytest.raises(ConfigError, match="is neither"):
        Tokenizer.load(tmp_path / "model.bin")
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer.json cannot be read"):
        Tokenizer.load(tmp_path)
    folder = tiny.write_hf_folder(tmp_path, tiny.byte_level(), chat_template="{% if %}")
    with pytest.raises(ConfigError, match="syntax error in line 1"):
        Tokenizer.load(folder)
    (folder / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ConfigError, match="must hold a JSON object, it holds a list"):
        Tokenizer.load(folder)


# ── GGUF ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"model": "llama"}, r"tokenizer.ggml.model is 'llama', only 'gpt2'"),
        ({"pre": "tekken"}, r"tokenizer.ggml.pre is 'tekken', served are .*smollm"),
        ({"pre": None}, r"has no tokenizer.ggml.pre"),
        ({"tokens": None}, r"has no tokenizer.ggml.tokens"),
        ({"merges": ["a notthere"]}, "merge 'a notthere' needs a token"),
        ({"eos_token_id": 70000}, r"eos_token_id is 70000, the vocabulary has \d+ tokens"),
    ],
)
def test_gguf_files_that_cannot_be_served(tmp_path: Path, values: dict[str, object], expected: str) -> None:
    path = tiny.write_gguf(tmp_path / "model.gguf", tiny.byte_level(), **values)
    with pytest.raises(ConfigError, match=expected):
        Tokenizer.load(path)


def test_gguf_named_templates(tmp_path: Path) -> None:
    path = tiny.write_gguf(
        tmp_path / "model.gguf",
        tiny.byte_level(),
        chat_template="default",
        chat_templates=["tool_use"],
        **{"chat_template.tool_use": "tools"},
    )
    tokenizer = Tokenizer.load(path)
    assert tokenizer.render_chat([{"role": "user"}]) == "default"
    assert tokenizer.render_chat([{"role": "user"}], tools=[{}]) == "tools"


def test_every_family_name_is_served(tmp_path: Path) -> None:
    for name in FAMILIES:
        Tokenizer.load(tiny.write_gguf(tmp_path / f"{name}.gguf", tiny.byte_level(), pre=name))


# ── the real model ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.e2e
def test_smollm2_is_that_of_transformers() -> None:
    """transformers does not know the ``smollm`` family, so its own pre-tokenizer is put in by hand."""
    from tokenizers import Tokenizer as Backend
    from transformers import AutoTokenizer

    from common.model_store import resolve

    path = resolve("smollm2-135m")
    tokenizer = Tokenizer.load(path)
    oracle = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    backend = Backend.from_str(oracle.backend_tokenizer.to_str())
    backend.pre_tokenizer = tiny.pre_tokenizer("smollm")
    rng = random.Random(11)
    for text in TEXTS + ["".join(rng.choices(PIECES, k=rng.randint(1, 30))) for _ in range(2000)]:
        ids = tokenizer.encode(text, add_special_tokens=True)
        assert ids == backend.encode(text).ids
        if not any(character.isnumeric() for character in text):
            assert ids == oracle.encode(text)
        assert tokenizer.decode(ids) == oracle.decode(ids, skip_special_tokens=True)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    expected = oracle.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tokenizer.render_chat(messages) == expected
    assert tokenizer.encode(expected, add_special_tokens=True) == oracle.encode(expected, add_special_tokens=False)
    assert (tokenizer.vocab_size, tokenizer.bos_token_id, tokenizer.eos_token_id) == (49152, 1, 2)
    assert tokenizer.encode("Hello world! 123", add_special_tokens=False) == [19556, 905, 17, 216, 33, 34, 35]
