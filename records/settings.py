"""Settings as the tools take them on a command line."""


def split_values(text: str) -> list[str]:
    """"a,(1,2)" -> ["a", "(1,2)"]: commas inside brackets belong to a value."""
    values, depth = [""], 0
    for letter in text:
        depth += (letter in "[(") - (letter in "])")
        if letter == "," and not depth:
            values.append("")
        else:
            values[-1] += letter
    return values
