"""The selections of a beam search: candidates of each beam, and the merge of all beams of a prompt."""
