"""Questions that a policy answers with a search engine: BM25 over a corpus of texts, by bm25s (arXiv:2407.03618)."""

from __future__ import annotations

import functools
import hashlib
import re
import string
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..data import datasets
from . import arguments, function, library

LOADING = threading.Lock()
SHOWN = 2000  # characters of a text that the policy sees
SYSTEM = (
    "Answer the question. Search as often as you need to. Then give the answer alone, between <answer> and </answer>."
)
QUERY = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
SEARCH = function("search", "Finds texts that have words of the query, the best first.", QUERY)


class World:
    """One question.

    Args:
      name: file of questions to train on, as `areax.adapters.data.datasets` reads them: "question", and "answer" or
        "golden_answers", a text or a list of them, of which each is right.
      corpus: file of texts: "contents", or "text" with or without a "title".
      heldout: file of questions to evaluate on.
      k: number of texts that a search finds.
      system: the system prompt.
    """

    tools = (SEARCH,)

    def __init__(self, name: str, corpus: str, *, heldout: str = "", k: int = 3, system: str = SYSTEM):
        if type(k) is not int or k < 1:
            raise ValueError(f"search: k must be a number from 1 on, got {k!r}")
        self._corpus, self._k, self._system = corpus, k, system

    @staticmethod
    def rows(
        split: str, name: str, corpus: str, *, heldout: str = "", k: int = 3, system: str = SYSTEM
    ) -> Iterable[dict[str, Any]]:
        """{"question", "answer", "corpus": hash of its texts} of each question.

        Raises:
          ValueError: there is no such file, or a row is no question, or no text.
        """
        option, file = ("name", name) if split == "train" else ("heldout", heldout)
        if not file:
            raise ValueError(f'search: rows for {split} need "{option}" in --env-options, a file, got {file!r}')
        hash_, made = _index(corpus)[0], []
        for row, place in datasets.placed(file):
            right = row.get("golden_answers", row.get("answer"))
            right = [right] if isinstance(right, str) else right
            texts = isinstance(right, list) and right and all(isinstance(one, str) and one.strip() for one in right)
            if not (isinstance(row.get("question"), str) and texts):
                raise ValueError(f'search: {place}: must have "question", and "answer", a text or a list of texts')
            made.append({"question": row["question"], "answer": right, "corpus": hash_})
        return made

    def reset(self, row: Mapping[str, Any]) -> list[dict[str, str]]:
        """Asks the row's question. Raises ValueError if the corpus is not that of the row any more."""
        if row["corpus"] != _index(self._corpus)[0]:
            raise ValueError(f"{self._corpus}: must be the corpus with which the run began, and has other texts")
        self._answers, self._found = row["answer"], 0.0
        asked = {"role": "user", "content": row["question"]}
        return [{"role": "system", "content": self._system}, asked] if self._system else [asked]

    def step(self, message: Mapping[str, Any]) -> tuple[list[dict[str, Any]], dict[str, float] | None, bool]:
        """Searches, once for each call; a message without a call is the answer.

        Its reward is 1 if it equals a right one but for case, punctuation and articles, as in SQuAD (arXiv:1606.05250);
        the component "found" is 1 if a text that was found has a right answer in it.
        """
        if calls := message.get("tool_calls"):
            told = [self._searched(call["function"]) for call in calls]
            tool = {"role": "tool", "name": "search"}
            return (
                [tool | {"tool_call_id": c["id"], "content": x} for c, x in zip(calls, told, strict=True)],
                None,
                False,
            )
        [*_, said] = re.findall(r"<answer>(.*?)</answer>", message["content"], re.DOTALL) or [message["content"]]
        right = normal(said) in map(normal, self._answers)
        return [], {"reward": float(right), "found": self._found}, True

    def _searched(self, call: Mapping[str, str]) -> str:
        query = (arguments(call["arguments"]) or {}).get("query")
        if call["name"] != "search" or not isinstance(query, str):
            return 'error: must be search with {"query": text}'
        found = _found(self._corpus, query, self._k)
        if any(f" {normal(answer)} " in f" {normal(text)} " for answer in self._answers for text in found):
            self._found = 1.0
        return "\n\n".join(f"({i + 1}) {text[:SHOWN]}" for i, text in enumerate(found)) or "Nothing was found."


def normal(text: str) -> str:
    """The text as answers are compared: lower case, without punctuation, articles, and spaces beyond one."""
    kept = text.lower().translate(str.maketrans("", "", string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", kept).split()) or text.strip().lower()  # of "A" or "+"


def _found(corpus: str, query: str, k: int) -> list[str]:
    """At most k texts that have words of the query, the best first."""
    _, texts, index = _index(corpus)
    words = library("bm25s", "search").tokenize([query], show_progress=False)
    [places], [scores] = index.retrieve(words, k=min(k, len(texts)), show_progress=False)
    return [texts[place] for place, score in zip(places, scores, strict=True) if score > 0]


def _index(corpus: str) -> tuple[str, Sequence[str], Any]:
    """(hash of the texts, the texts, their index), made once in a process."""
    with LOADING:
        return _indexed(corpus)


@functools.lru_cache(maxsize=4)
def _indexed(corpus: str) -> tuple[str, Sequence[str], Any]:
    bm25s, texts, hash_ = library("bm25s", "search"), list[str](), hashlib.sha256()
    for row, place in datasets.placed(corpus):
        text = row.get("contents", row.get("text"))
        if not isinstance(text, str) or not isinstance(title := row.get("title") or "", str):
            raise ValueError(f'search: {place}: must have "contents", or "text", got {sorted(row)}')
        texts.append(f"{title}\n{text}" if title and "contents" not in row else text)
        hash_.update(f"{len(texts[-1])}:{texts[-1]}".encode(errors="surrogatepass"))
    words = bm25s.tokenize(texts, show_progress=False)
    if not any(words.ids):
        raise ValueError(f"search: {corpus}: must have texts with words, got {len(texts)} without any")
    index = bm25s.BM25()
    index.index(words, show_progress=False)
    return hash_.hexdigest(), texts, index
