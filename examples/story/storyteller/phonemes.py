"""From English text to the phoneme ids of a Piper voice, with permissively licensed parts only.

gruut (MIT) looks words up in its dictionary, guesses those it does not find, and speaks numbers, dates and money
out. Its American IPA is broader than what the voice was trained on, so it is rewritten here: lengths of vowels,
the tap in "water", the unstressed "the" and "of" of connected speech.
"""

# ruff: noqa: RUF001 - letters that look alike are different sounds here

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import attrs
import gruut

__all__ = ["Utterance", "to_ids", "to_symbols", "utterances"]

START, END, PAD = "^", "$", "_"
SPACE, STRESSED, HALF_STRESSED, LONG, TIE = " ", "ˈ", "ˌ", "ː", "\u0361"
PRIMARY_OR_SECONDARY = STRESSED + HALF_STRESSED

# Vowels that the voice knows as long ones. Unstressed "i" ("story") and "ɚ" ("water") stay short.
ALWAYS_LONG = {"ɑ": "ɑː", "ɔ": "ɔː", "u": "uː"}
LONG_IF_STRESSED = {"i": "iː", "ɚ": "ɜː"}
VOWEL_LETTERS = frozenset("aeiouæɐɑɔəɚɛɜɪʊʌ")

# Little words that are not stressed within a sentence, whatever a dictionary says of them alone.
LITTLE_WORDS = """
a an and are as at be been but by can could did do does for from had has have he her him his i i'm in is it it's its
me my of on or our she should than that the their them then they this to us was we were will with would you your
"""
UNSTRESSED = frozenset(LITTLE_WORDS.split())

# What is typed in prose and what is said.
REWRITES: Sequence[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = (
    (re.compile(r"[\u2018\u2019\u02bc]"), "'"),
    (re.compile(r"[\u201c\u201d\u00ab\u00bb]"), '"'),
    (re.compile(r"\u2026"), "..."),
    (re.compile(r"\s*[\u2013\u2014]+\s*|\s+-+\s+|--+"), ", "),
    (re.compile(r"\.{2,}(?=\s+\S)"), ","),
    (re.compile(r"\.{2,}"), "."),
    (re.compile(r"[^A-Za-z0-9.,;:!?'\"()/$%&\u00a3\u20ac-]+"), " "),
    # A number that is one word with letters, or too long to have a name, is read in parts.
    (re.compile(r"(?<=[0-9])(?!(?:st|nd|rd|th|s)\b)(?=[A-Za-z])"), " "),
    (re.compile(r"[0-9]{13,}"), lambda digits: " ".join(digits[0])),
    (re.compile(r"\s+"), " "),
)
PAUSES = frozenset(",;:.!?")
CLOSING = re.compile(r"[.!?]")


class _Word(Protocol):
    text: str
    phonemes: Sequence[str] | None
    is_minor_break: bool
    is_major_break: bool


@attrs.frozen
class Utterance:
    """One sentence, ready for a voice."""

    words: int
    """How many words are spoken in it."""
    symbols: tuple[str, ...]
    """One IPA letter, mark, space or punctuation mark each."""


def utterances(text: str) -> Iterator[Utterance]:
    """Yield the sentences of `text` in the voice's alphabet; what has nothing to say in it yields nothing."""
    for sentence in gruut.sentences(_plain(text), lang="en-us", major_breaks=True, minor_breaks=True):
        words = list(sentence)
        count = sum(1 for word in words if _is_spoken(word))
        if count:
            yield Utterance(count, tuple(_sentence_symbols(words)))


def _plain(text: str) -> str:
    # Accents go first: the dictionary knows "cafe" and "naive", and a guesser would drop the unknown letter.
    decomposed = unicodedata.normalize("NFKD", text)
    text = "".join(letter for letter in decomposed if not unicodedata.combining(letter))
    for pattern, said in REWRITES:
        text = pattern.sub(said, text)
    return text.strip()


def _is_spoken(word: _Word) -> bool:
    return bool(word.phonemes) and not (word.is_minor_break or word.is_major_break)


def _sentence_symbols(words: Iterable[_Word]) -> list[str]:
    symbols: list[str] = []
    for word in words:
        if word.is_minor_break or word.is_major_break:
            mark = word.text.strip()[:1]
            # A pause follows a word; a second one in a row says nothing new.
            if symbols and symbols[-1] not in PAUSES:
                symbols.append(mark if mark in PAUSES else "," if word.is_minor_break else ".")
        elif word.phonemes:
            if symbols:
                symbols.append(SPACE)
            symbols.extend(to_symbols(word.phonemes, stressed=word.text.lower() not in UNSTRESSED))
    if symbols and not CLOSING.match(symbols[-1]):
        if symbols[-1] in PAUSES:
            symbols.pop()
        symbols.append(".")
    return symbols


def to_symbols(phonemes: Sequence[str], *, stressed: bool = True) -> list[str]:
    """Rewrite one word's phonemes, as gruut gives them, as single symbols of the voice's alphabet.

    Args:
        phonemes: such as ``["w", "ˈɔ", "t", "ɚ"]``; a stress mark stands in front of its vowel.
        stressed: False takes the stress off, but leaves vowels as long as they were.
    """
    symbols: list[str] = []
    for index, phoneme in enumerate(phonemes):
        stress = phoneme[0] if phoneme[0] in PRIMARY_OR_SECONDARY else ""
        sound = unicodedata.normalize("NFD", phoneme.lstrip(PRIMARY_OR_SECONDARY)).replace(TIE, "")
        sound = ALWAYS_LONG.get(sound, sound)
        if stress:
            sound = LONG_IF_STRESSED.get(sound, sound)
            if stressed:
                symbols.append(stress)
        elif sound == "t" and _is_tapped(phonemes, index):
            sound = "ɾ"
        symbols.extend(sound)
    return symbols


def _is_tapped(phonemes: Sequence[str], index: int) -> bool:
    """Tell whether a "t" is said as in American "water", "city" or "party"."""
    if not 0 < index < len(phonemes) - 1:
        return False
    before, after = phonemes[index - 1], phonemes[index + 1]
    # "button" and "mountain" have another sound there, which a plain "t" is closer to.
    before_nasal = after == "ə" and phonemes[index + 2 : index + 3] == ["n"]
    return (before[-1] in VOWEL_LETTERS or before == "ɹ") and after[0] in VOWEL_LETTERS and not before_nasal


def to_ids(symbols: Iterable[str], id_map: Mapping[str, Sequence[int]]) -> list[int]:
    """Return the ids of `symbols` as a Piper voice wants them: padded in between, with a start and an end.

    Symbols that the voice does not know are left out; a voice says the rest of the word well without them.

    Args:
        symbols: single symbols, as of `Utterance.symbols`.
        id_map: the voice's ``phoneme_id_map``.
    """
    pad = id_map[PAD]
    ids = [*id_map[START], *pad]
    for symbol in symbols:
        if symbol in (START, END, PAD) or (known := id_map.get(symbol)) is None:
            continue
        ids += known
        ids += pad
    ids += id_map[END]
    return ids
