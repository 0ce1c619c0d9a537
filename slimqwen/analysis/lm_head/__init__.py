"""Cost of smaller output heads: spectrum of the head, and bits per byte with low-rank and with 4-bit heads.

The head is W [rows, hidden]: `lm_head.weight`, or the embedding it is tied to. Only its use as output head changes
here, never the input embedding. It is read in blocks of rows and never held whole: the eigenvectors V of its Gram
matrix are its right singular vectors, so the best head of rank r (Eckart and Young, Psychometrika 1, 1936) is
W V_r V_r', and its logits are those of W V_r on hidden states multiplied by V_r.
"""
