"""``rrl top``: the runs of a user on the whole terminal, by Textual. Only this package imports Textual."""
