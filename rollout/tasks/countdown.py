"""Countdown: reach a target from given numbers, each used exactly once, by + - * / and brackets."""

from __future__ import annotations

import ast
import operator
import random
import re
from dataclasses import dataclass
from fractions import Fraction

from ..rewards.answers import without_thoughts

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
SYMBOLS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
PROMPT = (
    "Use each of the numbers {numbers} exactly once, with {operators} and brackets, to make {target}. "
    "Answer with the expression alone, between <answer> and </answer>."
)
MAX_LENGTH = 256  # characters of an expression: bounds the work and the depth of the recursion


@dataclass(frozen=True)
class Task:
    """The set of problems.

    Attributes:
      numbers: how many numbers a problem has.
      low, high: the smallest and the largest of them.
      max_target: targets lie in 1..max_target.
      operators: the operators that a solution may use, a subset of "+-*/".
      train, dev, heldout: rows per split.
      prompt: template with {numbers}, {operators} and {target}; "{numbers}={target}" is easier for a small model.
      seed: seed of the problems and their split.
    """

    numbers: int = 3
    low: int = 1
    high: int = 20
    max_target: int = 100
    operators: str = "+-*/"
    train: int = 2000
    dev: int = 200
    heldout: int = 500
    prompt: str = PROMPT
    seed: int = 0


def splits(task: Task = Task()) -> dict[str, list[dict]]:
    """Makes `{"train", "dev", "heldout"}` of rows `{"prompt", "answer", "completion", "numbers", "target", ...}`.

    A problem is (its numbers in any order, its target) and is in only one split. `answer` is the solution from which
    it was generated; `completion` is that solution in the format the prompt asks for.
    """
    if task.numbers < 1 or not 0 <= task.low <= task.high or task.max_target < 1:
        raise ValueError(
            "countdown: needs numbers >= 1, 0 <= low <= high and max_target >= 1, "
            f"got {task.numbers}, {task.low}..{task.high} and {task.max_target}"
        )
    if not task.operators or not set(task.operators) <= set(OPERATORS):
        raise ValueError(f"countdown: operators must be a subset of '+-*/', got {task.operators!r}")
    rng = random.Random(task.seed)
    wanted = task.train + task.dev + task.heldout
    found: dict[tuple, dict] = {}
    misses = 0
    while len(found) < wanted:
        numbers = [rng.randint(task.low, task.high) for _ in range(task.numbers)]
        solution, value = _expression(numbers, task.operators, rng)
        problem = (*sorted(numbers), value)
        good = value is not None and value.denominator == 1 and 1 <= value <= task.max_target
        if good and problem not in found:
            found[problem] = _row(numbers, int(value), solution, task)
            misses = 0
        else:
            misses += 1
            if misses > 1000 + 50 * len(found):
                raise ValueError(
                    f"countdown: the splits need {wanted} different problems, found {len(found)}; "
                    "ask for fewer rows, or widen the numbers, operators or targets"
                )
    rows = list(found.values())
    cut = task.train, task.train + task.dev
    return {"train": rows[: cut[0]], "dev": rows[cut[0] : cut[1]], "heldout": rows[cut[1] :]}


def row(record: dict) -> dict:
    """Converts a record with "target" and "nums" or "numbers" to a row as in `splits`, but without a solution."""
    numbers, target = record.get("nums", record.get("numbers")), record.get("target")
    if not (isinstance(numbers, list) and all(isinstance(n, int) for n in [target, *numbers])):
        raise ValueError(
            f"countdown: a record needs an integer 'target' and a list of integers 'nums', got {str(record)[:80]}"
        )
    made = _row(numbers, target, "", Task())
    return {name: value for name, value in made.items() if name not in ("answer", "completion")}


def _row(numbers, target, solution, task):
    shown = {
        "numbers": ",".join(map(str, numbers)),
        "operators": " ".join(task.operators),
        "target": target,
    }
    try:
        prompt = task.prompt.format(**shown)
    except (KeyError, IndexError, ValueError) as error:
        raise ValueError(
            f"countdown: the prompt may use {{numbers}}, {{operators}} and {{target}}, got {error} in {task.prompt!r}"
        ) from None
    return {
        "prompt": prompt,
        "answer": solution,
        "completion": f"<answer>{solution}</answer>" if "<answer>" in prompt else solution,
        "numbers": numbers,
        "target": target,
        "operators": task.operators,
    }


def _expression(numbers, operators, rng):
    """A random expression of all the numbers in random order, and its value; None if it divides by zero."""
    terms = [(str(n), Fraction(n)) for n in rng.sample(numbers, len(numbers))]
    while len(terms) > 1:
        (left, a), (right, b) = (terms.pop(rng.randrange(len(terms))) for _ in range(2))
        symbol = rng.choice(operators)
        if symbol == "/" and b == 0:
            return "", None
        terms.append((f"({left}{symbol}{right})", OPERATORS[symbol](a, b)))
    text, value = terms[0]
    return (text[1:-1] if len(numbers) > 1 else text), value


def evaluate(expression: str, operators: str = "+-*/") -> tuple[Fraction, list[int]]:
    """Evaluates an arithmetic expression exactly; returns its value and its numbers in order.

    Raises `ValueError` for anything other than whole numbers, the given operators and brackets: signs, powers, names
    and calls included.
    """
    if len(expression) > MAX_LENGTH or not re.fullmatch(r"[0-9+\-*/() ]+", expression):
        raise ValueError("countdown: not an expression of whole numbers, + - * / and brackets")
    used: list[int] = []

    def value(node):
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            used.append(node.value)
            return Fraction(node.value)
        if isinstance(node, ast.BinOp) and (symbol := SYMBOLS.get(type(node.op), "?")) in operators:
            left, right = value(node.left), value(node.right)
            if symbol == "/" and right == 0:
                raise ValueError("countdown: division by zero")
            return OPERATORS[symbol](left, right)
        raise ValueError(f"countdown: {ast.unparse(node)!r} is not allowed in an expression")

    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except SyntaxError as error:
        raise ValueError(f"countdown: not an expression: {error.msg}") from None
    return value(tree.body), used


def reward(text: str, row: dict) -> float:
    """1.0 if `text` is a correct expression for the row, else 0.0.

    Correct: its exact value is the target, and it uses each number exactly once and only the row's operators. The
    content of the last <answer>...</answer> counts, or the whole text if there is none; thoughts do not
    (`rewards.answers.without_thoughts`).
    """
    text = without_thoughts(text)
    tagged: list[str] = re.findall(r"<answer>((?:(?!<answer>).)*?)</answer>", text, re.DOTALL)
    try:
        value, used = evaluate((tagged[-1] if tagged else text).strip(), row["operators"])
    except ValueError:
        return 0.0
    return float(value == row["target"] and sorted(used) == sorted(row["numbers"]))
