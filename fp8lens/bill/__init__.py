"""What a program costs beside its matmuls, and what that was for."""
