"""What is written on the pages: words of a fixed list, made-up words, names, numbers and marks.

Made-up words are as frequent as real ones, so that reading them takes the letters and not the dictionary.
"""

from random import Random


def _listed(words: str) -> list[str]:
    return words.split()


WORDS = _listed(
    "the of and to in is that for it as was with be by on not he his but at are this have from or had an they which "
    "one you were all her she there would their we him been has when who will no more if out so up said what its "
    "about than into them can only other time new some could these two may first then do any like my now over such "
    "our man me even most made after also did many must before back through years where much your way well down "
    "should because each just those people state little good very make world still own see work long here get both "
    "between life being under never day same another know while last might us great old year off come since against "
    "go came right used take three states himself few house use during without again place around however home small "
    "found thought went say part once general high upon school every does got united left number course war until "
    "always away something fact though water less public put think almost hand enough far took head yet government "
    "system better set told nothing night end why called eyes find going look asked later knew point next program "
    "city business give group toward young days let room word things want area sense order present rather method "
    "result measure figure table model value sample study data analysis report section chapter volume page "
    "temperature pressure energy surface layer structure frequency estimate error function matrix vector equation "
    "network server request picture answer memory machine engine column header footnote margin quality review invoice "
    "amount balance account total customer delivery contract agreement schedule quarter revenue payment patient "
    "therapy protein sequence species climate region harbour bridge kitchen garden quick brown fox jumps lazy"
)
NAMES = _listed(
    "Adams Baker Carter Diaz Evans Fischer Garcia Huang Ivanov Jensen Kumar Lopez Miller Novak Okafor Patel Quinn "
    "Rossi Schmidt Tanaka Ueda Vargas Weber Xu Young Zhang London Paris Berlin Madrid Oslo Vienna Zürich Köln Malmö"
)
_ONSETS = _listed("b c d f g h j k l m n p qu r s t v w x y z bl br ch cl cr dr fl gr pl pr sh sl st str th tr wh")
_VOWELS = _listed("a e i o u ai ea ee io oo ou ä ö ü é è")
_CODAS = ["", "", "", *_listed("b ck d ff g l ll m n nd ng nt p r rd s ss st t th x zz")]
_UNITS = ("%", " kg", " mm", " °C", " €", " £", "ms", "x", " GB", " W")
_CODE = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_/.:#@&+=<>[]{}()|~^*!?%$;,'\"`\\"
ACCENTED = "£§°±×äöüÄÖÜßéèàç–—‘’“”•€"
ALPHABET = "".join(chr(code) for code in range(32, 127)) + ACCENTED
"""Every character that text (not a formula) may have."""


def made_up(dice: Random) -> str:
    word = ""
    for _ in range(dice.choice((1, 1, 2, 2, 3, 4))):
        # The few accented vowels are rarer than a vowel of five would be.
        vowel = dice.choice(_VOWELS) if dice.random() < 0.3 else dice.choice("aeiou")
        word += dice.choice(_ONSETS) + vowel + dice.choice(_CODAS)
    return word


def number(dice: Random) -> str:
    digits = dice.randrange(10 ** dice.randint(1, 5))
    form = dice.randrange(8)
    if form == 0:
        return f"{digits:,}"
    if form == 1:
        return f"{digits / 100:.2f}"
    if form == 2:
        return f"{digits / 10:.1f}{dice.choice(_UNITS)}"
    if form == 3:
        return f"{dice.randint(1, 28):02d}.{dice.randint(1, 12):02d}.{dice.randint(1950, 2030)}"
    if form == 4:
        return f"{dice.choice('-+±')}{digits}"
    return str(digits)


def code(dice: Random) -> str:
    return "".join(dice.choice(_CODE + ACCENTED) for _ in range(dice.randint(2, 8)))


def word(dice: Random) -> str:
    """One word without marks around it."""
    kind = dice.random()
    if kind < 0.44:
        return dice.choice(WORDS)
    if kind < 0.82:
        return made_up(dice)
    if kind < 0.88:
        return dice.choice(NAMES)
    if kind < 0.96:
        return number(dice)
    if kind < 0.985:
        return dice.choice(WORDS if dice.random() < 0.5 else NAMES).upper()
    return code(dice)


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def heading(dice: Random) -> str:
    words = [word(dice) for _ in range(dice.randint(1, 6))]
    style = dice.random()
    if style < 0.15:
        words = [text.upper() for text in words]
    elif style < 0.5:
        words = [capital(text) for text in words]
    text = capital(" ".join(words))
    return f"{numbering(dice)} {text}" if dice.random() < 0.35 else text


def numbering(dice: Random) -> str:
    return ".".join(str(dice.randint(1, 12)) for _ in range(dice.randint(1, 3)))


def sentence(dice: Random, length: int) -> str:
    words: list[str] = []
    for place in range(length):
        text = word(dice)
        kind = dice.random()
        if kind < 0.03:
            text = f"({text})"
        elif kind < 0.05:
            text = dice.choice(("“{}”", "‘{}’", '"{}"', "'{}'", "[{}]")).format(text)
        elif kind < 0.065:
            text += f"-{dice.choice(WORDS)}"
        elif kind < 0.075:
            text += dice.choice((" –", " —", " §", " &", " ×", " ="))
        if place + 1 < length and dice.random() < 0.07:
            text += dice.choice(",,,;:")
        words.append(text)
    return capital(" ".join(words)) + dice.choice("......?!:")


def paragraph(dice: Random, characters: int) -> str:
    """Sentences of about this many characters together, at least one."""
    sentences = [sentence(dice, dice.randint(3, 16))]
    while sum(map(len, sentences)) < characters:
        sentences.append(sentence(dice, dice.randint(3, 16)))
    return " ".join(sentences)
