"""Read files that people write: job.toml (:mod:`.job`), the site's health rules, Hugging Face folders."""
