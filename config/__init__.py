"""Read what people write: job.toml (:mod:`.job`), the site's health rules, and Hugging Face model folders.

This package exports nothing itself; import its modules.
"""
