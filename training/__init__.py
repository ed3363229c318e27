"""How the bundled model was made: corpus, tasks, training and its quality gates."""
