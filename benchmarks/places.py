"""Writes questions about a corpus of sentences, which a search by the right word finds.

    python benchmarks/places.py FOLDER COUNT FIRST

FOLDER gets train.jsonl, questions about COUNT people (fewer at the end); FIRST is 0, or for questions about others at
least 1024. corpus.jsonl, about all people, is written beside FOLDER.
"""

import json
import sys
from pathlib import Path

TOWNS = "Ulm Bonn Kiel Mainz Trier Worms Jena Gera Fulda Celle".split()
PEOPLE = range(100, 310)  # their names
SEEN = 140  # people of training


def main(folder: Path, count: int, first: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    of = lambda i: (PEOPLE[i * 101 % len(PEOPLE)], TOWNS[i * 7 % len(TOWNS)])
    whole = [of(i) for i in range(len(PEOPLE))]
    asked = whole[SEEN:] if first else whole[:SEEN]
    rows = [{"question": f"In which town does person {name} live?", "answer": town} for name, town in asked[:count]]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = [{"contents": f"Person {name} lives in the town of {town}."} for name, town in whole]
    (folder.parent / "corpus.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
