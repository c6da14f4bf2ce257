"""What a mesh decided by, and the names of classes, are told in the report of a run."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path

from test_report import finish, make_run, page_of, slices, step

from halocline.choices import Choices
from halocline.train.reporting.report import write_report

RANK = {"kind": "rank", "rank": 0, "tile": {"D": [0, 8]}, "shape": [8], "memory": 1}


def page(folder: Path, choices: Choices | None) -> str:
    told = [] if choices is None else [{"kind": "choices", "values": asdict(choices)}]
    (folder / "log.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in [*told, RANK]))
    return write_report(folder).path.read_text()


def rows(text: str) -> list[list[str]]:
    """Cells of the table of choices."""
    table = text.partition("What the mesh decides by")[2].partition("</table>")[0]
    return [re.findall(r"<td>([^<]*)</td>", row) for row in re.findall(r"<tr>(<td>.*?)</tr>", table)]


def test_the_usual_choices_are_folded_away(tmp_path: Path) -> None:
    assert "What the mesh decides by" not in page(tmp_path, None)  # a run of an older version
    text = page(tmp_path, Choices())
    assert "<summary>What the mesh decides by</summary>" in text
    assert ["halo beside", "32768", "32768", "everywhere"] in rows(text) and len(rows(text)) == 9


def test_other_choices_are_shown_beside_the_defaults(tmp_path: Path) -> None:
    text = page(tmp_path, Choices(one_sum_ranks=4, at={"head": Choices(remedy="gather")}))
    assert "<summary>What the mesh decides by</summary>" not in text
    assert [row for row in rows(text) if row[0] in ("one sum ranks", "remedy")] == [
        ["remedy", "None", "None", "everywhere"],
        ["one sum ranks", "4", "8", "everywhere"],
        ["remedy", "gather", "None", "head"],
    ]


def test_classes_have_their_names_in_the_legend(tmp_path: Path) -> None:
    told = 'workload = "unet3d"\nsteps = 8\nclass_names = ["background", "liver & spleen"]\n'
    text = page_of(finish(make_run(tmp_path / "run", [step(0)], told), slices())).text
    assert "liver & spleen" in text and "background is left grey" in text and "class 1" not in text
