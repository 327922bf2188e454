"""Loading a Hugging Face tokenizer, with its end and padding tokens settled."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_rl.config.model_metadata import find_code_elsewhere
from mindspeed_rl.files import describe_missing, read_json
from mindspeed_rl.hub import fetch, parse_hub_name
from mindspeed_rl.importing import auto_tokenizer, plain_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


#: names of what the classes of transformers read, of which a tokenizer has at least one
_VOCABULARIES = ("token*", "vocab*", "*.model", "*.tiktoken", "tekken.json", "merges.txt", "spm*", "bpe*")


def has_tokenizer(folder: Path) -> bool:
    """Return True for a folder with a file that the classes of transformers read a tokenizer from."""
    return any(fnmatch(file.name, pattern) for file in folder.iterdir() for pattern in _VOCABULARIES)


def check_tokenizer_files(path: str | Path) -> bool:
    """Check the files of a tokenizer; return False for a name on a hub. Imports nothing, so errors are reported at once.

    Raises:
        ValueError: the path means a folder that is not there, has no tokenizer, or whose JSON files cannot be read.
    """
    if not _is_folder(path):
        return False
    folder = Path(path).expanduser()
    if not has_tokenizer(folder):
        raise ValueError(
            f"cannot load a tokenizer from tokenizer_name_or_path={str(path)!r}: the folder holds none ("
            f"{folder.absolute()} has no tokenizer.json, tokenizer.model or vocab.json); copy the model's files there"
        )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        try:
            if (folder / name).is_file():
                read_json(folder / name)
        except ValueError as error:
            raise ValueError(f"cannot load a tokenizer from tokenizer_name_or_path={str(path)!r}: {error}") from error
    return True


def _is_folder(path: str | Path) -> bool:
    """Return True for a folder of this machine, False for a name on a hub.

    Raises:
        ValueError: it means a folder that is not there.
    """
    folder = Path(path).expanduser()
    is_path = "/" in str(path) and parse_hub_name(str(path)) is None  # such as a name in a folder that exists
    looks_local = folder.is_absolute() or str(path).startswith(("./", "../", "~")) or folder.exists() or is_path
    # a mistyped folder must not become a request to the hub
    if looks_local and not folder.is_dir():
        problem = "" if os.path.exists(folder) else f": {describe_missing(path)}"
        raise ValueError(
            f"tokenizer_name_or_path={str(path)!r} is not a folder{problem}; give the folder that holds tokenizer.json"
        )
    return looks_local


def load_tokenizer(path: str | Path, *, trust_remote_code: bool = False, use_fast: bool = True) -> PreTrainedTokenizerBase:
    """Return the tokenizer with `eos_token_id` and `pad_token_id` both set (padding falls back to the end token).

    Args:
        path: a folder with tokenizer files, or the name of a model on a hub.
        trust_remote_code: runs Python files that come with the tokenizer; off unless the user asks for it.
        use_fast: take the Rust implementation where there is one.

    Raises:
        ValueError: nothing loadable is there, or the tokenizer has no end token.
    """
    tokenizer: Any = read_tokenizer(path, trust_remote_code=trust_remote_code, use_fast=use_fast)
    if tokenizer.eos_token_id is None:
        # the folder, also of a name on a hub
        raise ValueError(f"the tokenizer in {tokenizer.name_or_path!r} has no eos_token; set one in its tokenizer_config.json")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def read_tokenizer(path: str | Path, *, trust_remote_code: bool = False, use_fast: bool = True) -> PreTrainedTokenizerBase:
    """Return the tokenizer as its files have it, which may be without an end or a padding token; see `load_tokenizer`.

    Raises:
        ValueError: nothing loadable is there.
    """
    local = check_tokenizer_files(path)
    if not local and (name := parse_hub_name(str(path))) is not None:
        path, local = fetch(name, "tokenizer_name_or_path", "tokenizer"), True
    if local and trust_remote_code:
        _check_code(Path(path).expanduser())
    is_plain_folder = False
    try:
        is_plain_folder = local and use_fast and not trust_remote_code and _names_plain_class(Path(path).expanduser())
        # not by AutoTokenizer, which first imports the model's configuration, and with it 1,000 modules
        kind: Any = plain_tokenizer() if is_plain_folder else auto_tokenizer()
        tokenizer: Any = kind.from_pretrained(
            str(Path(path).expanduser()) if local else str(path),
            **({} if is_plain_folder else {"trust_remote_code": trust_remote_code, "use_fast": use_fast}),
        )
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"cannot load a tokenizer from tokenizer_name_or_path={str(path)!r}: {reason}") from error
    if local and not is_plain_folder:
        tokenizer = _obey_class(tokenizer, Path(path).expanduser(), trust_remote_code=trust_remote_code)
    return tokenizer


def _check_code(folder: Path) -> None:
    """Check that the trusted code of a folder is in it.

    Raises:
        ValueError: a class comes from another repository.
    """
    for file in (folder / "tokenizer_config.json", folder / "config.json"):
        if file.is_file() and (found := find_code_elsewhere(read_json(file).get("auto_map"))) is not None:
            raise ValueError(
                f"tokenizer_name_or_path: {file}: auto_map.{found[0]} names code of another repository ({found[1]}), which is "
                f"not run; copy that file into the folder and write {found[1].rpartition('--')[2]}."
            )


def _names_plain_class(folder: Path) -> bool:
    """Return True for a folder whose tokenizer_config.json names the class that only reads its tokenizer.json."""
    file = folder / "tokenizer_config.json"
    named = read_json(file).get("tokenizer_class") if file.is_file() else None
    return named in _PLAIN_CLASSES and (folder / "tokenizer.json").is_file()


def _obey_class(tokenizer: Any, folder: Path, *, trust_remote_code: bool) -> Any:
    """Load a folder again with the plain class of tokenizer.json, if its tokenizer_config.json names that class.

    For the model types of its own classes transformers takes these, with their own steps in place of the file's.
    """
    if type(tokenizer).__name__ in _PLAIN_CLASSES or not _names_plain_class(folder):
        return tokenizer
    plain = next((kind for kind in type(tokenizer).__mro__ if kind.__name__ in _PLAIN_CLASSES), None)
    return tokenizer if plain is None else plain.from_pretrained(str(folder), trust_remote_code=trust_remote_code)


def is_plain(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return True for a tokenizer that takes all steps from its tokenizer.json."""
    return type(tokenizer).__name__ in _PLAIN_CLASSES


#: names of transformers' class that takes all steps from tokenizer.json
_PLAIN_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")
#: texts whose tokens are compared: blanks, line ends, digits, code, other scripts
_SAMPLE_TEXTS = (
    "The green guitars stood near 12 red boats, and didn't move.",
    "  def f(x):\n\treturn x ** 2  # comment\n\n",
    "你好，世界！ 3.14 + 2/7 = ? Ünïcödé ß",
)


def check_tokens(tokenizer: PreTrainedTokenizerBase, path: str | Path) -> None:
    """Compare the tokens of some texts with tokenizer.json's own, and their texts.

    transformers builds the steps of a known model_type by itself and ignores the steps in the file.

    Raises:
        ValueError: tokens or text of a sample differ.
    """
    # the folder of a name on a hub
    file = Path(tokenizer.name_or_path).expanduser() / "tokenizer.json"
    if not tokenizer.is_fast or not file.is_file():
        return
    from tokenizers import Tokenizer

    reference = Tokenizer.from_file(str(file))
    reference.no_truncation()
    reference.no_padding()
    for text in _SAMPLE_TEXTS:
        try:
            expected = reference.encode(text, add_special_tokens=False).ids
            ids = tokenizer.encode(text, add_special_tokens=False)
            expected_text = reference.decode(expected, skip_special_tokens=False)
            decoded = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        except Exception as error:
            raise ValueError(f"tokenizer_name_or_path={str(path)!r}: {text!r} cannot be encoded: {error}") from error
        if ids != expected or decoded != expected_text:
            raise ValueError(
                f"tokenizer_name_or_path={str(path)!r}: {text!r} becomes {decoded!r} ({len(ids)} tokens), but {expected_text!r}"
                f" ({len(expected)} tokens) by tokenizer.json itself: transformers builds {type(tokenizer).__name__} by its own"
                " rules; set tokenizer_class to PreTrainedTokenizerFast in tokenizer_config.json"
            )


def check_tokenizer(
    tokenizer: PreTrainedTokenizerBase, sizes: Mapping[str, int], path: str | Path, *, pads: bool = True
) -> list[str]:
    """Check the tokenizer of a run, a session or a server against its file and its models; return warnings.

    Raises:
        ValueError: see `check_tokens` and `check_vocabulary`.
    """
    check_tokens(tokenizer, path)
    return check_vocabulary(tokenizer, sizes, path, pads=pads)


def check_vocabulary(
    tokenizer: PreTrainedTokenizerBase, sizes: Mapping[str, int], path: str | Path, *, pads: bool = True
) -> list[str]:
    """Check that the models of a run have the tokens of its tokenizer; return a warning where they lack only added ones.

    Some published models have added tokens that their embedding lacks, such as the one for images in a model of text. Only
    texts with such a token cannot be read; they are refused where they are found.

    Args:
        sizes: number of tokens that a model can read, by its folder.
        pads: the models read the padding token, as in training.

    Raises:
        ValueError: a model lacks the end token, a padding token that it reads, or tokens that any text may have.
    """
    key = f"tokenizer_name_or_path={str(path)!r}"
    folder, vocab_size = min(sizes.items(), key=lambda item: item[1])
    named = {"eos_token": tokenizer.eos_token_id} | ({"pad_token": tokenizer.pad_token_id} if pads else {})
    for name, token_id in named.items():
        if isinstance(token_id, int) and token_id >= vocab_size:
            raise ValueError(
                f"{key}: its {name} is token {token_id}, but the model's vocabulary has {vocab_size} ({folder}); give the"
                f" tokenizer of the model, or another {name} in its tokenizer_config.json"
            )
    vocabulary, added = tokenizer.get_vocab(), {*tokenizer.get_added_vocab(), tokenizer.pad_token}
    missing = {token_id: token for token, token_id in vocabulary.items() if token_id >= vocab_size}
    if not missing:
        return []
    of_text = {token_id: token for token_id, token in missing.items() if token not in added}
    kind, tokens = ("tokens of text", of_text) if of_text else ("added tokens", missing)
    first = min(tokens)
    problem = (
        f"{key}: the tokenizer has {len(vocabulary)} tokens, but the model's vocabulary has {vocab_size} ({folder}): it lacks"
        f" {len(tokens)} {kind}, such as {first} ({tokens[first]!r})"
    )
    if of_text:
        raise ValueError(f"{problem}; give the tokenizer of the model")
    return [f"{problem}; texts with them are refused"]


def set_eos_token(tokenizer: PreTrainedTokenizerBase, token: str) -> None:
    """Make `token` the tokenizer's end token; padding that was the old end token stays where it is.

    Raises:
        ValueError: the vocabulary does not hold `token` as one entry.
    """
    token_id = tokenizer.convert_tokens_to_ids(token)
    if token_id is None or token_id == tokenizer.unk_token_id and token != tokenizer.unk_token:
        raise ValueError(f"the tokenizer has no token {token!r}, which the chat template ends its turns with")
    tokenizer.eos_token = token


def hash_vocabulary(vocabulary: Mapping[str, int]) -> str:
    """Return 12 digits that differ for other tokens, and for the same tokens with other ids."""
    listed = "\n".join(f"{index} {token!r}" for token, index in sorted(vocabulary.items()))
    return hashlib.sha256(listed.encode("utf-8", "surrogatepass")).hexdigest()[:12]


def single_token(tokenizer: PreTrainedTokenizerBase, text: str, key: str) -> int:
    """Return the id of a text that is one token.

    Args:
        key: run file key or option of the text, for the error.

    Raises:
        ValueError: it is several tokens, or none.
    """
    ids = tokenizer.encode(text, add_special_tokens=False)
    if len(ids) != 1:
        raise ValueError(f"{key}: {text!r} is {len(ids)} tokens in this tokenizer, but must be one.")
    return ids[0]
