"""Counts, and says so. What it counted is kept in a file of the run, so that a new life goes on where the last died."""

from __future__ import annotations

import time

import rrl


def main() -> None:
    with rrl.join() as me:
        kept = me.run_dir.path / f"{me.launch.life.replica.replace('/', '-')}.count"
        count = int(kept.read_text()) if kept.exists() else 0
        with me.phase("counting"):
            while count < me.settings["options"]["until"] and not me.stopping.is_set():
                time.sleep(0.2)
                count += 1
                kept.write_text(str(count))
                me.progress()
        print(f"counted to {count}", flush=True)


if __name__ == "__main__":
    main()
