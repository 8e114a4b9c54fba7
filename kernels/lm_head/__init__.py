"""The LM head of a beam search: each beam's best next tokens and their log-probabilities."""
