"""Counts, and keeps the count in a file of the run, so that a new incarnation continues the count."""

from __future__ import annotations

import time

import rrl


def main() -> None:
    with rrl.join() as worker:
        checkpoint = worker.run_dir.path / f"{worker.launch.incarnation.replica.replace('/', '-')}.count"
        count = int(checkpoint.read_text()) if checkpoint.exists() else 0
        with worker.phase("counting"):
            while count < worker.options["until"] and not worker.stopping.is_set():
                time.sleep(0.2)
                count += 1
                new = checkpoint.with_suffix(".new")
                new.write_text(str(count))
                new.rename(checkpoint)  # atomically: no kill leaves a half-written file
                worker.progress()
        print(f"counted to {count}", flush=True)


if __name__ == "__main__":
    main()
