"""`python -m tests.support.chaos`: one chaos run, or several, by hand. `scripts/chaos` calls it."""

from __future__ import annotations

import argparse
import logging
import random
import shutil
import sys
from pathlib import Path

from tests.support.chaos.evidence import Evidence
from tests.support.chaos.faults import HarnessError
from tests.support.chaos.run import ChaosRun, new_directory
from tests.support.chaos.schedule import Plan, plan

HARNESS_FAILED = 70


def main(arguments: list[str]) -> int:
    """0: every invariant held; 1: one did not; 70: the run itself broke down."""
    options = _parser().parse_args(arguments)
    seconds = options.seconds if options.seconds is not None else options.minutes * 60
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1_000_000)
    wanted = plan(seed, seconds)
    if options.plan:
        tell(*wanted.faults)
        return 0
    tell(f"chaos: seed {seed}, {seconds:g} s, {len(wanted.faults)} faults")
    return _run(wanted, options.dir, keep=options.keep)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/chaos", description="Breaks everything, and checks that nothing is lost or doubled."
    )
    parser.add_argument("--minutes", type=float, default=2.0, help="how long things go wrong (2)")
    parser.add_argument("--seconds", type=float, help="the same in seconds")
    parser.add_argument("--seed", type=int, help="decides what goes wrong when; by lot without it")
    parser.add_argument("--dir", type=Path, help="where to keep everything; must not exist yet")
    parser.add_argument("--keep", action="store_true", help="keep the logs also when all went well")
    parser.add_argument("--plan", action="store_true", help="only print what would go wrong")
    return parser


def _run(wanted: Plan, directory: Path | None, *, keep: bool) -> int:
    where = directory or new_directory()
    where.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(
        filename=where / "harness.log", level=logging.INFO
    )  # what the local gateway says of cut clients
    run = ChaosRun(wanted, where)
    try:
        evidence = run.run()
    except (HarnessError, AssertionError) as error:  # the latter from a wait that was in vain
        tell(f"the run broke down: {error}\n  everything is kept in {where}")
        return 1 if run.evidence.violations else HARNESS_FAILED
    tell(summary(evidence))
    if evidence.violations:
        tell(f"{len(evidence.violations)} VIOLATIONS with seed {wanted.seed}; everything is kept in {where}")
        return 1
    if not keep and directory is None:
        shutil.rmtree(where, ignore_errors=True)
    tell(f"every invariant held: seed {wanted.seed}, {wanted.seconds:g} s")
    return 0


def tell(*lines: object) -> None:
    """On stdout, at once."""
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


def summary(evidence: Evidence) -> str:
    """What happened, in numbers."""
    facts = [f"  {name}: {value}" for name, value in evidence.facts.items()]
    counts = [f"  {evidence.counts[name]:6} {name}" for name in sorted(evidence.counts)]
    return "\n".join([*counts, *facts])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
