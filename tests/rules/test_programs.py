"""Random programs, cut over two to four ranks: one rank's numbers, or a refusal; nothing wrong, and nobody waits."""

from collections import Counter

import pytest
from programs import Program, verdict
from ranges import often

EACH = often(100)


@pytest.mark.long
@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore")  # torch's own, of shapes and modes that a program meets
@pytest.mark.parametrize("part", range(4))
def test_programs(part: int) -> None:
    programs = [Program(part * 100_000 + number) for number in range(EACH)]
    answers = {program.seed: (verdict(program), program) for program in programs}
    wrong = {seed: (answer, str(p)) for seed, (answer, p) in answers.items() if answer.startswith(("wrong", "raised"))}
    assert not wrong
    counts = Counter(answer.split(":")[0] for answer, _ in answers.values())
    assert counts["exact"] >= 0.9 * (counts["exact"] + counts["refused"])
