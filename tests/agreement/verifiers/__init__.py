"""One module a verifier, named as the environment.

rows(gym, rng) -> rows            that both graders take
answer(row, rng) -> label, items  one answer: what it is (kind and style), and its Responses output items
theirs(gym) -> grader             async (row, items) -> reward, their code
SETTINGS, JUDGES                  of ours, where the defaults will not do
RULES                             why verdicts differ on purpose
"""
