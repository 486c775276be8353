"""Asks a live Prometheus what the dashboards and rules ask: `python -m tools.panels --prometheus http://127.0.0.1:9090`.

The rule: every query of every panel, variable and annotation must return at least one number; every rule that this
Prometheus has loaded must be healthy, and every metric that it asks for must be there. Those that fail are listed, and the
exit status is 1. Standard library only, so that it runs anywhere.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

DASHBOARDS = Path(__file__).resolve().parent.parent / "deploy" / "grafana" / "dashboards"
_VARIABLES = {"$__rate_interval": "1m", "$run": ".*", "$node": ".*"}
_SELECTOR = re.compile(r"(?:[\w:]*nolocod_[\w:]+|process_\w+|\bup\b)(?:\{[^}]*\})?")
_LABEL_VALUES = re.compile(r"label_values\((.+), *(\w+)\)")
_SECONDS = 10.0
"""For one answer."""

Get = Callable[[str, dict[str, str]], Any]
"""The `data` of one answer of Prometheus' HTTP interface, by path and parameters."""


@dataclass(frozen=True)
class Question:
    where: str
    query: str
    kind: str = "query"
    """Or "values": a variable's."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.panels", description="Check that dashboards and rules have data.")
    parser.add_argument("--prometheus", required=True, metavar="URL")
    parser.add_argument("--wait", type=float, default=0.0, metavar="SECONDS", help="ask again for as long, before it fails")
    options = parser.parse_args(arguments)
    deadline = time.monotonic() + options.wait
    while True:
        try:
            total, failed = check(asking(options.prometheus.rstrip("/")))
        except (OSError, ValueError) as error:
            total, failed = 0, [f"{options.prometheus}: {error}"]
        if not failed or time.monotonic() >= deadline:
            break
        time.sleep(2)
    for line in failed:
        print(line)  # noqa: T201  # a command line tool
    print(f"{total} queries, {len(failed)} without data")  # noqa: T201
    return 1 if failed else 0


def asking(url: str) -> Get:
    """The Prometheus at `url`."""

    def get(path: str, parameters: dict[str, str]) -> Any:  # noqa: ANN401  # whatever JSON it sends
        whole = f"{url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(whole, timeout=_SECONDS) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            if error.code in (400, 422):  # it says what is wrong with the query
                raise ValueError(json.load(error)["error"]) from error
            raise

    return get


def check(get: Get) -> tuple[int, list[str]]:
    """How many questions there are, and a line for each that has no answer."""
    boards = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(DASHBOARDS.glob("*.json"))]
    asked = [question for board in boards for question in of_board(board)]
    groups = get("rules", {})["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    if not rules:
        return len(asked), ["this Prometheus has loaded no rules"]
    asked += [question for rule in rules for question in of_rule(rule)]
    failed = [f"rule {rule['name']}: {rule.get('lastError')}" for rule in rules if rule["health"] == "err"]
    for question in asked:
        try:
            if not has_data(get, question):
                failed.append(f"{question.where}: nothing for {question.query}")
        except ValueError as error:
            failed.append(f"{question.where}: {error} in {question.query}")
    return len(asked), failed


def of_board(board: dict[str, Any]) -> Iterator[Question]:
    """All queries of one dashboard, with its variables replaced."""
    title = board["title"]
    for panel in board["panels"]:
        for target in panel.get("targets", []):
            yield Question(f"{title}, panel {panel['title']}", replaced(target["expr"]))
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            yield Question(f"{title}, variable {variable['name']}", replaced(variable["query"]), "values")
    for annotation in board["annotations"]["list"]:
        yield Question(f"{title}, annotation {annotation['name']}", replaced(annotation["target"]["expr"]))


def of_rule(rule: dict[str, Any]) -> Iterator[Question]:
    """A recorded value must be there. An alert is silent where all is well: what it looks at must be there."""
    if rule["type"] == "recording":
        yield Question(f"rule {rule['name']}", rule["name"])
    else:
        for selector in dict.fromkeys(_SELECTOR.findall(rule["query"])):
            yield Question(f"alert {rule['name']}", selector)


def has_data(get: Get, question: Question) -> bool:
    """Whether there is at least one number, or one value of a variable."""
    if question.kind == "values":
        found = _LABEL_VALUES.fullmatch(question.query)
        if found is None:
            raise ValueError("no label_values()")
        return any(get(f"label/{found[2]}/values", {"match[]": found[1]}))
    result = get("query", {"query": question.query})["result"]
    return any(not math.isnan(float(sample["value"][1])) for sample in result)


def replaced(query: str) -> str:
    for name, value in _VARIABLES.items():
        query = query.replace(name, value)
    return query


if __name__ == "__main__":
    sys.exit(main())
