"""Code that the built-in roles share: the policy model and its weights, tokenizers, and tasks."""
