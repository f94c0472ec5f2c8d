"""Matplotlib's SVG as a small file: what a viewer does not need goes, and a part of the picture is a line."""
import re
from xml.etree import ElementTree as xml

NAMESPACES = {"": "http://www.w3.org/2000/svg", "xlink": "http://www.w3.org/1999/xlink"}
NUMBERS = ("d", "x", "y", "width", "height", "transform")


def compact(svg: str) -> str:
    """The same picture, to a hundredth of a point, without metadata or ids that nothing refers to."""
    for prefix, name in NAMESPACES.items():
        xml.register_namespace(prefix, name)
    root = xml.fromstring(svg)
    used = set(re.findall(r"#([\w-]+)", svg))
    for element in root.iter():
        if element.get("id") not in used:
            element.attrib.pop("id", None)
        for name in NUMBERS:
            if name in element.attrib:
                element.set(name, re.sub(r"(\.\d\d)\d+", r"\1", " ".join(element.get(name).split())))
        if element.get("transform", "").startswith("rotate(-0 "):
            del element.attrib["transform"]
        if element.tag.endswith("}g"):
            element[:] = [inner for child in element for inner in unwrapped(child)]
        for part in element:
            part.tail = None
        if not (element.text or "").strip():
            element.text = None
    root[:] = [part for child in root for part in unwrapped(child) if not part.tag.endswith("}metadata")]
    for part in root:
        part.tail = "\n"
    return xml.tostring(root, encoding="unicode") + "\n"


def unwrapped(element: xml.Element) -> list[xml.Element]:
    """The parts of a group that sets nothing for them; any other element as it is."""
    plain = element.tag.endswith("}g") and not element.attrib.keys() - {"id"}
    return [inner for child in element for inner in unwrapped(child)] if plain else [element]
