"""The wordings of the questions. `{a}` is the class with its article, `{s}` without, `{p}` its plural."""

PRESENCE = (
    "Is there {a}?",
    "Is there {a} in this picture?",
    "Do you see {a}?",
    "Can you see {a} in the room?",
    "Does the picture show {a}?",
    "Is {a} visible here?",
    "Look for {a}. Is there any?",
    "Check this room for {a}. Answer yes or no.",
    "You are inspecting a flat. Do you see {a}? Answer yes or no.",
    "Home inspection: is there {a} in the room?",
    "Tell me whether {a} is present. Answer yes or no.",
    "Answer yes or no: is there {a}?",
    "Has the photo got {a} in it?",
    "Inspect the picture and say yes or no: {a}?",
)
HAZARD = (
    "Which hazard is visible?",
    "Which hazard do you see? Answer with one or two words.",
    "Name the hazard in this room.",
    "What is dangerous in this picture? Answer with one or two words.",
    "You are inspecting a flat. Which hazard is there? Answer with one or two words.",
    "What kind of hazard does the picture show?",
    "Is there a hazard here, and which? Answer with its name or none.",
    "Home inspection: name the hazard, or say none.",
    "Which defect or hazard can be seen?",
)
COUNT = (
    "How many {p} are there?",
    "How many {p} do you see?",
    "Count the {p}.",
    "How many {p} are in the picture?",
    "What is the number of {p}? Answer with a digit.",
    "How many {p} can you count in this room?",
    "Count the {p} and answer with a digit.",
    "Home inspection: how many {p} are visible?",
    "Tell me how many {p} there are.",
)
COLOUR = (
    "What colour is the {s}?",
    "Which colour does the {s} have?",
    "What is the colour of the {s}?",
    "Name the colour of the {s}.",
    "Tell me the colour of the {s}. Answer with one word.",
    "The {s} is which colour?",
    "What colour has the {s} in this picture?",
    "Look at the {s}. What colour is it?",
)
POSITION = (
    "Where is the {s}?",
    "Where do you see the {s}?",
    "Is the {s} left, middle or right?",
    "On which side is the {s}? Answer left, middle or right.",
    "In which part of the picture is the {s}?",
    "Where in the room is the {s}? Answer left, middle or right.",
    "Find the {s}: left, middle or right?",
    "Tell me where the {s} is.",
)
DESCRIPTION = (
    "Describe the picture.",
    "Describe this room.",
    "What does the picture show?",
    "What do you see?",
    "Give a short description of the room.",
    "Write down what an inspector would note here.",
    "Describe the room and its hazards.",
    "You are inspecting a flat. Describe what you see.",
)


def article(name: str) -> str:
    """The class with its article ("damp" takes none)."""
    if name == "damp":
        return name
    return ("an " if name[0] in "aeiou" else "a ") + name


def plural(name: str) -> str:
    return name + "s"
