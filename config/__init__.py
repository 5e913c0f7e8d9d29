"""Read files that people write: job.toml (:mod:`.job`), the site's health rules, and Hugging Face model folders.
"""
