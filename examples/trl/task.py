"""A task: answer a digit with the next one. Guessing is right in one of twelve cases, a trained policy in all."""


class NextDigit:
    def __init__(self, seed):
        self.seed = seed

    def prompt(self, i):
        return str((self.seed + i) % 10)

    def answer(self, i):
        return str((self.seed + i + 1) % 10)

    def score(self, i, answer):
        right = float(answer == self.answer(i))
        return right, right


def make(seed):
    return NextDigit(seed)
