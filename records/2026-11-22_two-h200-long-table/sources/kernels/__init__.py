"""Operations that the project exists for, one a file, each with a plain PyTorch twin."""
