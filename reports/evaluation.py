"""What ``dspark evaluate`` prints."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dspark.reports.text import number, percent, table

_GROUPS = (
    ("picture", "rows with a picture"),
    ("grounded", "picture-grounded tokens"),
    ("text", "text-only rows"),
)


def evaluation(found: dict[str, Any]) -> str:
    """Drafts side by side; ``found`` is what ``evaluate_drafts`` returns."""
    drafts = found["drafts"]
    held_out = found["eval_fraction"]
    which = "all" if held_out is None else f"held out by --eval-fraction {held_out:g}"
    lines = [f"{found['cache']}: {found['rows']:,} rows ({which})"]
    names = _names([draft["draft"] for draft in drafts])
    for name, draft in zip(names, drafts, strict=True):
        if draft["zero_hidden_states"]:
            lines.append(f"{name}: zeros in place of the target's hidden states")
        if draft["rows_trained_on"]:
            lines.append(f"{name}: was trained on {draft['rows_trained_on']:,} of these rows")
    tables = [
        _table("draft", names, [("architecture", [d["arch"] for d in drafts]), *_all(drafts)])
    ]
    for key, title in _GROUPS:
        groups = [draft[key] for draft in drafts]
        if any(group and group["anchors"] for group in groups):
            tables.append(_table(title, names, _group(groups)))
    stated = [draft["calibration"] for draft in drafts]
    if any(stated):
        title = "calibration error of the confidence, scaled (temperature)"
        tables.append(_table(title, names, _calibration(stated)))
    return "\n\n".join(["\n".join(lines), *tables])


def _names(folders: Sequence[str]) -> list[str]:
    """Short names where they tell the drafts apart."""
    short = [Path(folder).name for folder in folders]
    return short if len(set(short)) == len(short) else list(folders)


Rows = list[tuple[str, list[str]]]


def _table(title: str, names: Sequence[str], rows: Rows) -> str:
    return table([(label, *cells) for label, cells in rows], (title, *names))


def _scalars(groups: Sequence[dict[str, Any] | None], shown: Sequence[tuple[str, str]]) -> Rows:
    def cell(group: dict[str, Any] | None, key: str) -> str:
        show = number if key.startswith("tau") else percent
        return show(group[key] if group else None)

    return [(label, [cell(group, key) for group in groups]) for label, key in shown]


def _lists(groups: Sequence[dict[str, Any]], shown: Sequence[tuple[str, str]]) -> Rows:
    rows = []
    for label, key in shown:
        lists = [group[key] for group in groups]
        for k in range(max(map(len, lists))):
            cells = [percent(values[k]) if k < len(values) else "" for values in lists]
            rows.append((label.format(k + 1), cells))
    return rows


def _all(drafts: Sequence[dict[str, Any]]) -> Rows:
    return [
        *_scalars(
            drafts,
            (
                ("tau: tokens per round, with bonus token", "tau"),
                ("tau without bonus token", "tau_without_bonus"),
                ("tau, greedy", "tau_greedy"),
                ("top-1 agreement", "agreement"),
            ),
        ),
        *_lists(
            drafts,
            (
                ("acceptance rate of draft token {}", "acceptance"),
                ("of token {}, all before it accepted", "conditional"),
                ("of tokens 1 to {} together", "prefix"),
            ),
        ),
        ("anchors", [f"{draft['anchors']:,}" for draft in drafts]),
    ]


def _group(groups: Sequence[dict[str, Any] | None]) -> Rows:
    shown = (("tau", "tau"), ("tau, greedy", "tau_greedy"), ("top-1 agreement", "agreement"))
    first = [percent(group["acceptance"][0]) if group else "-" for group in groups]
    counts = [f"{group['anchors']:,}" if group else "-" for group in groups]
    return [
        *_scalars(groups, shown),
        ("acceptance rate of draft token 1", first),
        ("anchors", counts),
    ]


def _calibration(stated: Sequence[dict[str, Any] | None]) -> Rows:
    """Of each position and of each prefix, before and after temperature scaling."""

    def cell(found: dict[str, Any] | None, key: str, k: int) -> str:
        if found is None or k >= len(found[key]):
            return "-"
        scaled = percent(found[f"{key}_scaled"][k])
        return f"{percent(found[key][k])} -> {scaled} ({found['temperatures'][k]:.2f})"

    depth = max(len(found["temperatures"]) for found in stated if found)
    return [
        (label.format(k + 1), [cell(found, key, k) for found in stated])
        for label, key in (("draft token {}", "ece"), ("draft tokens 1 to {}", "ece_prefix"))
        for k in range(depth)
    ]
