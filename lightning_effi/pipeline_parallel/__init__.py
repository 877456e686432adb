"""Pipeline parallelism: the user's own ``training_step`` on every stage, with only that stage's blocks real."""
