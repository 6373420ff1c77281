"""Series of runs: several configurations, each with several seeds."""

import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from kuramoto_jax.config import Config
from kuramoto_jax.train import TrainError, fit


def train_and_report(
    configs: Mapping[str, Sequence[Config]], workdir: Path, report: Callable[[], None]
) -> None:
    """Trains what is not trained yet and then reports, unless asked to stop before.

    Args:
      configs: what to train, by row; the run of a row and seed is in workdir/ROW/seed_N.
      workdir: directory of all runs.
      report: called once at least one run is finished.

    Raises:
      TrainError: after the report, if runs failed.
    """
    failures = train(configs, workdir)
    if failures is None:
        return
    total = sum(map(len, configs.values()))
    if len(failures) < total:
        report()
    if failures:
        raise TrainError(f"{len(failures)} of {total} runs failed: {'; '.join(failures)}")


def train(configs: Mapping[str, Sequence[Config]], workdir: Path) -> list[str] | None:
    """Trains what is not trained yet; a run that fails does not keep the others from theirs.

    Returns:
      What failed and why, or None if SIGINT or SIGTERM asked to stop.
    """
    failures: list[str] = []
    done, total = 0, sum(map(len, configs.values()))
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for number, (name, variants) in enumerate(configs.items(), start=1):
            for config in variants:
                print(f"\nrow {number} of {len(configs)}: {name}, seed {config.seed}", flush=True)
                directory = workdir / name / f"seed_{config.seed}"
                try:
                    if fit(config, directory, log=_say) is None:
                        raise KeyboardInterrupt
                    done += 1
                except TrainError as error:
                    failures.append(f"{directory}: {error}")
                    _say(f"failed: {error}")
    except KeyboardInterrupt:
        _say(f"stopped: {done} of {total} runs are done; the same command continues")
        return None
    finally:
        signal.signal(signal.SIGTERM, before)
    return failures


def _say(line: str) -> None:
    print(line, flush=True)
