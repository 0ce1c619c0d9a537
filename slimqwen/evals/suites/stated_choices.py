r"""Finds the choice that a response states, as a reader sees it, in the languages in which users answer.

1. The last statement of the form \boxed{X}, "the answer is X" or "X is the right answer" that is not negated, asked
   or supposed.
2. Else a lone letter at the start, followed by its end, a new line or punctuation, or a choice's own text there.
3. Else the only letter that the response names. Two different letters without a statement are no answer.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from slimqwen.evals.suites.exact_answers import FULL_STOPS, compatible, is_same, normalised

_BOLD = "\x1f"
"""Stands for markup such as ** while a response is read."""

_LATIN = "A-Za-zÀ-ɏ0-9_"
_NOT_IN_WORD = rf"(?<![{_LATIN}])(?<![{_LATIN}]['-])(?<!\.)"
_NO_WORD = rf"(?![{_LATIN}+#])(?!-[{_LATIN}])(?!\.[A-Z]\b)"
_ALONE = rf"{_NO_WORD}(?!'[{_LATIN}])"
_SPACE = rf"[\s{_BOLD}]{{0,9}}"
_OPENING = rf"[\s{_BOLD}\"'「『【】《〈«\[({{:=>→✅✔☑️-]{{0,9}}"
_CLOSING = rf"[\s{_BOLD}\"'」』】》〉»\])}}]{{0,9}}"
_LIKE_LATIN = str.maketrans("АВСЕНІЈКМОРЅТХΑΒΕΖΗΙΚΜΝΟΡΤΥΧ", "ABCEHIJKMOPSTXABEZHIKMNOPTYX")
_ALIKE = re.compile(
    r"(?<!\w)[АВСЕНІЈКМОРЅТХΑΒΕΖΗΙΚΜΝΟΡΤΥΧ](?!\w)(?=\s*(?:$|[^\w\s])|\s+(?:потому|так как|поскольку|γιατί|επειδή))",
    re.MULTILINE,
)
"""Cyrillic and Greek capitals that look as Latin ones, where they stand as letters: В and С are words too."""

_CUES: Final = (
    # English
    r"\b(?:answer|ans)\b(?:\s+(?:option|choice|letter|key)\b)?(?:\s+(?:to|for|of|here|"
    r"in)\b[^.\n:?!]{0,80}?)?(?:,[^.,\n]{1,30},)?"
    rf"{_SPACE}[\"'\])]?{_SPACE}(?:(?:is|was|'s|would be|must be|should be|will be|has to be|"
    rf"can only be|remains)(?:\b|(?=n't))|[:=>-])",
    r"(?:^|\n)[\W_]{0,9}(?:(?:final|my|the|correct)\s+){0,3}answer[\W_]{0,9}\n",
    rf"\b(?:correct|right|best|true|final|chosen)\s+(?:option|choice|one|response|statement|letter|"
    rf"pick|selection)\b{_SPACE}"
    rf"(?:(?:is|was|would be|must be|should be)\b|:)",
    rf"\b(?:choice|selection|solution|conclusion|verdict|result){_SPACE}:",
    r"\b(?:choose|chose|pick|picked|select|selected|go with|going with|opt for|wähle|choisis|elijo|"
    r"escojo|escolho|scelgo|"
    r"kies|väljer|wybieram|vybírám|выбираю|обираю|seçiyorum|memilih|pilih|chọn|أختار|בוחר(?:ת)?)\b",
    # German, Dutch, Danish, Norwegian, Swedish
    rf"\b(?:antwort|lösung|antwoord|svaret?)\b(?:\s+(?:auf|zu|"
    rf"op)\b[^.\n:?!]{{0,60}}?)?{_SPACE}(?:(?:ist|lautet|wäre|is|är|er)\b|[:=-])",
    r"\b(?:richtig|korrekt)(?:e \w+)?\s+(?:ist|wäre)\b",
    # French
    rf"\b(?:réponse|solution|option)\b(?:\s+(?:correcte|exacte|finale|juste|(?:à|au|"
    rf"de)\b[^.\n:?!]{{0,60}}?)){{0,2}}{_SPACE}(?:(?:est|serait)\b|[:=-]|(?=n'est pas\b))",
    # Spanish, Portuguese, Italian, Romanian
    rf"\b(?:respuesta|resposta|risposta|solución|răspunsul?|(?:opción|opção|opzione|"
    rf"alternativa)(?=\s+corr?et?ct?a))\b"
    rf"(?:\s+(?:corr?ec?t?t?[ao]|final[e]?|corect|es correcta|giusta|certa|(?:a|de|alla|"
    rf"para)\b[^.\n:?!]{{0,60}}?)){{0,2}}{_SPACE}"
    r"(?:(?:es|sería|é|seria|è|sarebbe|este)\b|[:=-]|(?=(?:no es|não é|non è|nu este)\b))",
    r"\bla correcta es\b",
    # Russian, Ukrainian, Bulgarian, Polish, Czech, Greek
    rf"\b(?:ответ(?:ом является)?|відповідь|отговор(?:ът)?|(?:правильный|"
    rf"верный)\s+вариант)\b(?:\s+на\b[^.\n:?!]{{0,60}}?)?{_SPACE}(?:[:=-]|(?:это|будет|є|е)\b)*",
    r"\b(?:правильно|верно)\b\s*[:-]",
    rf"\b(?:odpowiedź|odpowiedzią|odpověď|odpoveď)\b{_SPACE}(?:(?:to|jest|je)\b|[:=-])*",
    rf"\bαπάντηση\b{_SPACE}(?:είναι\b|[:=-])",
    # Turkish, Vietnamese, Indonesian
    rf"\b(?:cevap|cevabı|yanıt|yanıtı)\b(?:\s+şıkkı)?{_SPACE}[:=-]?",
    rf"(?:đáp án|câu trả lời)(?:\s+(?:đúng|chính xác|cuối cùng|"
    rf"của[^.\n:?!]{{0,40}}?)){{0,2}}{_SPACE}(?:là\b|[:=-])",
    rf"\b(?:jawaban|jawapan)(?:nya)?(?:\s+(?:yang\s+)?(?:benar|tepat|"
    rf"betul)(?:nya)?)*{_SPACE}(?:(?:adalah|ialah)\b|[:=-])?",
    # Chinese, Japanese, Korean
    rf"(?<![誤不正解回])(?:答え|答|正解|正答|解答|回答|正しいの)(?:は|が|、|{_SPACE}[:=-])",
    r"(?:答案|正解|正确(?:的)?(?:选项|答案|的)|正確(?:的)?(?:選項|答案|的)|最佳选项|回答)(?:应该|應該|应当|应|應|就|也|只能|可能)*"
    rf"{_SPACE}(?:是|为|為|选择|選擇|选|選|[:=-])?",
    r"(?:选择|選擇|选(?!项)|選(?!項|択))(?:了|的是)?",
    rf"(?<!오)(?:정답|답변|답|맞는 것)(?:은|는|이|{_SPACE}[:=-])",
    # Arabic, Persian, Urdu, Hebrew
    rf"(?:الإجابة|الاجابة|الجواب|إجابة|جواب|پاسخ)(?:\s+(?:الصحيحة|الصحيح|النهائية|صحیح|"
    rf"درست))*{_SPACE}(?:هي\b|هو\b|[:=-])*",
    rf"(?:התשובה|תשובה)(?:\s+(?:הנכונה|הסופית|נכונה))*{_SPACE}(?:היא\b|[:=-])*",
    # Hindi, Bengali, Tamil, Telugu, Thai
    rf"(?:उत्तर|जवाब|सही विकल्प|উত্তর|விடை|பதில்|సమాధానం)(?:\s+(?:है|হল|হলো))?{_SPACE}[:=-]?",
    rf"(?:คำตอบ|ตอบ)(?:ที่ถูกต้อง|ที่ถูก|สุดท้าย)*{_SPACE}(?:คือ|เป็น|[:=-])*",
)
_CUE = re.compile("|".join(_CUES), re.IGNORECASE)
"""What stands before a stated answer."""

_FILLER = re.compile(
    rf"{_OPENING}(?:(?:the|option|choice|letter|number|answer|definitely|clearly|probably|most|likely|"
    rf"certainly|obviously|"
    r"actually|simply|indeed|therefore|thus|just|only|really|la|le|die|der|das|den|el|lo|il|η|το|"
    r"a letra|a alternativa|"
    r"a opção|a opción|opción|opção|opzione|opsi|letra|lettre|lettera|alternativa|proposition|"
    r"buchstabe|antwort|variante|"
    r"möglichkeit|wohl|eindeutig|вариант|буква|пункт|под буквой|литера|είναι|phương án|đáp án|pilihan|huruf|şıkkı|"
    r"seçenek|الخيار|الحرف|حرف|گزینه|विकल्प|ตัวเลือก|ข้อ|बिकल्प|option)(?![\w'])|(?:选项|選項|第|选择肢|選択肢|记号|記号|"
    r"바로|보기|선택지|옵션)|l')",
    re.IGNORECASE,
)
_NEGATION = re.compile(
    rf"{_OPENING}(?:(?:not|n't|never|neither|nicht|weder|keine?|n'est pas|pas|ni|non è|non|não é|não|"
    rf"no es|no|nu este|nu|не|ни|nie|není|değil|bukan|không phải(?: là)?|"
    r"ليست?|לא|नहीं|ไม่ใช่|δεν|any of)(?!\w)|不是|不|並非|并非|非|沒有|没有)",
    re.IGNORECASE,
)
_CONTRAST = re.compile(
    r"\b(?:but|rather|instead|sondern|mais|sino|mas|ma|а|sino que|bensì|it is|it's|correct is|tapi|"
    r"melainkan|mà là|بل|אלא)\b|แต่(?:เป็น)?|而是|,是|而应|"
    r"なく[、,て]?|아니라|아니고|बल्कि",
    re.IGNORECASE,
)
_NEGATED_AFTER = re.compile(
    rf"{_CLOSING}(?:选项|選項|項)?\s*(?:が|は)?(?:では?な|じゃな|でな|では?あり|じゃあり|とは限ら|(?:이|가|은|는)?\s*(?:정답이?\s*)?아니|(?:이|가)?\s*아닙|"
    r"değil|नहीं|নয়|不是|不对|不對|不正|是?错|是?錯|错误|(?:is|was|seems)\s+(?:also\s+|clearly\s+)?(?:not|wrong|"
    r"incorrect|false|out)\b|(?:is|was)n't|"
    r"(?:ist|wäre)\s+(?:nicht|falsch)|(?:n')?est\s+(?:pas|faux|fausse)|no\s+es|es\s+incorrect|не\s|"
    r"неверн|неправильн)",
    re.IGNORECASE,
)
_NEGATED_BEFORE = re.compile(
    r"(?:\b(?:not(?! hard)|never|cannot|neither|nor|hardly|(?<!no )doubt|deny|nicht|keine?|pas|não|"
    r"nie|не|ne|δεν)(?:\s+\w+){0,4}\s*$|"
    r"\b(?:people|many|most|some|others|students|they|someone|one|you|i)\s+(?:might|may|could|often|wrongly|"
    r"mistakenly)\s+(?:\w+\s+)?$|\b(?:people|many|most|some|others|students|they|someone)\s+(?:would|"
    r"will)\s+(?:\w+\s+)?$|"
    r"\b(?:common|popular|frequent)\s+(?:\w+\s+)?$|"
    r"(?:很多人|许多人|許多人|有人|有些人|不少人|大多数人|多くの人|많은 사람)[^.,;:!?\n]*$|"
    r"n't(?:\s+\w+){0,4}\s*$|\b(?:no|non)\s*(?:\w+\s)?$|(?:不|非|别)$|"
    r"\b(?:if|whether|suppos\w+|assum(?:e|ing)|imagine|unless|except|wrong|incorrect|false|tempting|"
    r"mistaken|other|another|"
    r"(?:some|many|others|people|one|you|students?)\s+(?:people\s+|students\s+)?(?:(?:may|might|"
    r"could|would|often|will)\s+)*"
    r"(?:think|say|believe|guess|assume|choose|pick|claim|argue|answer)\w*|falsche|wenn|ob|falls|mauvaise|fausse|"
    r"incorrecte?|si|incorrecta|mala|errada|se|sbagliata|неправильн\w*|неверн\w*|ошибочн\w*|если|"
    r"yanlış|salah|गलत|ผิด)\b[^.,;:!?\n]*$|"
    r"(?:错误|錯誤|不正确|不正確|常见)的?$|(?:不是|不能|不应该?|不應該?|不该|不可|并非|如果|假如|若|是否|間違った|誤った|もし|틀린|잘못된|만약|خاطئة|إذا|"
    r"ไม่ใช่|không|bukan|ليست?|לא|नहीं)[^.,;:!?\n]*$)",
    re.IGNORECASE,
)
_CLAUSE_END = re.compile(
    r"[.;:!?,。、।؟،؛\n]|\b(?:but|so|therefore|because|and|hence|thus|then|since|sondern|aber|also|"
    r"mais|donc|pero|mas|но|а|поэтому|значит)\b|"
    r"所以|因此|因为|故|但",
    re.IGNORECASE,
)
_WORDS_AFTER_LETTER = (
    "if|when|where|while|than|then|are|were|has|have|can|could|does|may|might|looks|fits|because|"
    "since|as|for|and|or|nor|but|not|rather|which|with|due|given|only|here|in|by|per|is|was|it|this|"
    "that|the|would|must|seems|"
    "weil|denn|da|ist|und|oder|noch|car|parce|est|et|ou|porque|pues|es|ya|y|o|ni|é|pois|perché|è|e|"
    "потому|так|поскольку|и|или|"
    "dır|çünkü|karena|vì|bởi"
)
_ARTICLE = re.compile(rf"\s+(?!(?:{_WORDS_AFTER_LETTER})\b)[^\W\d_]", re.IGNORECASE)
_SAME_CASE_WORD = re.compile(r"\s+[^\W\d_]*[a-zß-öø-ÿ]")
_LETTER = rf"([A-Z]){_ALONE}"
_STATED_LETTER = re.compile(
    rf"{_OPENING}(?:([A-Z]){_NO_WORD}(?!'(?![dt][ıiuü]r)[{_LATIN}])|([a-z])(?={_CLOSING}(?:$|[.)\],:;\"'\n」』】}}])))"
)
_AND_ANOTHER = re.compile(
    rf"{_CLOSING}(?:/|、|&|\b(?:and|or|und|oder|et|ou|y|o|e|и|или|ve|veya|dan|atau|và|hoặc)\b|和|或|与|與|"
    rf"及|と|や|か|または|또는|还是|還是|それとも|아니면|와|과|"
    rf"و|أو|और|या|หรือ|และ|,(?={_OPENING}[A-Z]{_CLOSING}(?:$|[.,]|or\b|and [A-Z]\b)))(?:\s*(?:also|"
    rf"perhaps|maybe|possibly|even|vielleicht))?"
    rf"{_OPENING}(?:(?:option|choice|选项|選択肢)\s*)?{_LETTER}(?={_CLOSING}(?:$|[.,;:!?\n。、)]|"
    rf"[^\x00-\u024f]|are\b|both\b|could\b|may\b|might\b))",
)
_ASKED = re.compile(
    rf"{_CLOSING}(?:吗|嗎|ですか|일까요?|인가요?)?\s*[?؟]|{_CLOSING}(?:吗|嗎|ですか|일까|인가)"
)
_BOXED = re.compile(r"\\f?box(?:ed)?\s*(?:\{([^{}]*)\}|([A-Z])\b)")
_SAID_OF_LETTER = re.compile(
    rf"{_NOT_IN_WORD}{_LETTER}{_CLOSING}(?:选项|選項|項|번)?\s*(?:"
    r"(?:is|was|would be|must be)\s+(?:therefore |thus |clearly |definitely |indeed |probably |most likely )*(?:"
    r"(?:the|my|our)\s+(?:only\s+|most\s+|best\s+|final\s+)*(?:correct|right|best|true|answer|"
    r"one)\b(?:\s+(?:answer|choice|option|one))?|"
    r"(?:correct|right|true)(?=[.,;!)\s]*(?:$|because|since|as\b|\n|[.,;!)])))|"
    r"(?:是|为|為)?(?:唯一)?(?:正确|正確|对|對|正解)|(?:が|は|、)(?:正解|正しい|答え)|\s*सही|ถูก|(?:가|이|은|는)\s*(?:정답|답|맞|옳)|"
    r"(?:ist|wäre)\s+(?:die\s+)?(?:richtig|korrekt)|(?:est|serait)\s+(?:la\s+)?(?:bonne\s+réponse|réponse|correct)|"
    r"(?:es|é|è)\s+(?:la\s+|a\s+)?(?:respuesta|resposta|risposta|correct|corret|giusta)|"
    r"[-:]?\s*(?:это\s+)?(?:правильный|верный)\s+ответ"
    r")"
)
_START = re.compile(
    rf"{_OPENING}[#>•\s]*(?:(?:option|choice|letter|answer|opción|opção|option|lettre|antwort|вариант|"
    rf"选项|選項|選択肢|보기)\s*)?{_OPENING}"
    rf"([A-Z]){_ALONE}(?P<after>{_CLOSING})",
    re.IGNORECASE,
)
_END_OF_LETTER = re.compile(
    rf"$|\n|[.:;!,。、।:)\]」】》』{_BOLD}]|\s-\s|-{{2}}|\s?[-–—]\s|\s*\\\\|"
    r"\s+(?:because|since|as|for|weil|denn|da|car|parce|porque|pues|perché|потому|так как|поскольку|"
    r"çünkü|karena|vì)\b|"
    r"\s*(?:因为|因為|です|だ。|입니다|이다|이에요|예요)"
)
_TEX = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mathsf|bf|rm)\s*\{([^{}]*)\}")


class _Statement(NamedTuple):
    """A stated answer.

    Attributes:
        position: place in the response.
        choice: the choice; None where the statement names another letter, or two.
    """

    position: int
    choice: int | None


def stated_choice(response: str, choices: Sequence[str]) -> int | None:
    """Index of the choice that a response states; None if it states none, or several.

    Args:
        choices: listed in the question under the letters A, B, C, …
    """
    text = _readable(response)
    text = _without_list(text, choices)
    if len(whole := text.strip(f"{_BOLD} \n")) != 1:
        for number, choice in enumerate(choices):
            if is_same(whole.replace(_BOLD, ""), choice):
                return number
    statements = sorted(_statements(text, choices))
    if statements:
        return statements[-1].choice
    start = _choice_at_start(text, choices)
    return _only_letter(text, len(choices)) if start is None else start.choice


def stated_texts(response: str) -> Iterator[str]:
    """Yield texts that may be the answer in the last statement of a response ("the answer is …"); none without one."""
    text = _readable(response)
    boxed = [(match.start(), match[1] or match[2] or "") for match in _BOXED.finditer(text)]
    cued = [
        (match.end(), text[match.end() :])
        for match in _CUE.finditer(text)
        if not _is_negated_before(text, match.start())
    ]
    if not (boxed or cued):
        return
    _, rest = max(boxed + cued)
    lines = [line for line in rest.replace(_BOLD, "").splitlines() if line.strip()]
    line = lines[0].strip() if lines else ""
    if _NEGATION.match(line) or line.endswith("?"):
        return
    yield line
    yield re.split(rf"(?<=[{FULL_STOPS}!])\s|[。।۔]", line)[0]
    yield re.split(
        r"[\s,;(-]*(?:\b(?:because|since|weil|denn|car|parce que|porque|потому что)\b|因为|因為|なので)", line
    )[0]


def _readable(response: str) -> str:
    """The response in compatible characters; markup becomes `_BOLD`, TeX around letters goes."""
    text = _TEX.sub(r"\1", compatible(response)).replace("&nbsp;", " ")
    text = re.sub(r"\*+|`+|__+|</?(?:b|strong|em|i)>", _BOLD, text)
    text = re.sub(r"\\[()\[\]]|\$", "", text)
    text = re.sub(r"\s*\n\s*", "\n", re.sub(r"[^\S\n]+", " ", text))
    return _ALIKE.sub(lambda match: match[0].translate(_LIKE_LATIN), text).strip()


def _without_list(text: str, choices: Sequence[str]) -> str:
    """The text without a repetition of the whole list of choices at its start, if anything follows it."""
    lines = text.split("\n")
    shown = [line for line in lines if line.strip()][: len(choices)]
    repeats = len(shown) == len(choices) > 1 and all(
        (match := re.fullmatch(rf"[\W_]*{chr(ord('A') + number)}\s*[.):]\s*(.*)", line.strip()))
        and normalised(match[1].replace(_BOLD, "")) == normalised(choice)
        for number, (line, choice) in enumerate(zip(shown, choices, strict=True))
    )
    return text.partition(shown[-1])[2].strip() if repeats else text


def _statements(text: str, choices: Sequence[str]) -> Iterator[_Statement]:
    for match in _BOXED.finditer(text):
        if not _is_negated_before(text, match.start()):
            value = match[1] or match[2] or ""
            found = _value_of(value, choices)
            yield _Statement(match.start(), found.choice if found else None)
    for match in _CUE.finditer(text):
        if _is_negated_before(text, match.start()):
            continue
        found = _value_of(text[match.end() :], choices)
        if found is not None:
            yield _Statement(match.end() + found.position, found.choice)
    for match in _SAID_OF_LETTER.finditer(text):
        is_asked = text[match.end() :].lstrip(" \"'").startswith("?")
        if not (
            is_asked or _is_negated_before(text, match.start()) or _NEGATED_AFTER.match(text, match.end())
        ):
            yield _Statement(match.start(1), _index(match[1], choices))


def _is_negated_before(text: str, position: int) -> bool:
    """Whether the words before a statement, in its clause, deny or suppose it."""
    before = text[max(0, position - 80) : position]
    clause = before[max((match.end() for match in _CLAUSE_END.finditer(before)), default=0) :]
    return _NEGATED_BEFORE.search(clause) is not None


def _value_of(rest: str, choices: Sequence[str]) -> _Statement | None:
    """The choice that the text after "the answer is" names; None if it names none, denies it or asks for it."""
    position, is_negated = 0, False
    while match := _FILLER.match(rest, position) or _NEGATION.match(rest, position):
        is_negated = is_negated or _NEGATION.match(rest, position) is not None
        position = match.end()
    if not is_negated and (number := _text_at(rest[position:], choices)) is not None:
        return _Statement(position, number)
    match = _STATED_LETTER.match(rest, position)
    if match is None:
        return None
    end = match.end()
    letter = (match[1] or match[2]).upper()
    if _is_word(letter, rest, end) or _ASKED.match(rest, end):
        return None
    another = _AND_ANOTHER.match(rest, end)
    if is_negated or _NEGATED_AFTER.match(rest, end):
        sentence = rest[end : end + 80].partition("\n")[0]
        turn = _CONTRAST.search(sentence)
        found = _value_of(sentence[turn.end() :], choices) if turn else None
        return (
            None
            if found is None or turn is None
            else _Statement(end + turn.end() + found.position, found.choice)
        )
    if another is not None and another[1] != letter:
        return _Statement(position, None)
    return _Statement(match.start(), _index(letter, choices))


def _text_at(rest: str, choices: Sequence[str]) -> int | None:
    """Index of the longest choice whose own text stands at the start; letters alone are labels, not texts."""
    line = re.sub(rf"^{_OPENING}", "", rest).replace(_BOLD, "").partition("\n")[0]
    found = []
    for number, choice in enumerate(choices):
        text = compatible(choice).strip().rstrip(FULL_STOPS)
        following = line[len(text) :]
        if (
            len(text) > 1
            and line[: len(text)].casefold() == text.casefold()
            and not re.match(r"\w|[.,]\d", following)
        ):
            found.append((len(text), number))
    return max(found)[1] if found else None


def _choice_at_start(text: str, choices: Sequence[str]) -> _Statement | None:
    """The lone letter or the choice's own text at the start of a response; other letters choose None."""
    match = _START.match(text)
    if match is not None:
        letter, after = match[1], match["after"]
        ends = (
            bool(after.strip() or "\n" in after)
            or _END_OF_LETTER.match(text, match.start("after")) is not None
        )
        is_lower = letter.islower() and not re.match(r"\s*(?:[).:\]]|$)", text[match.start("after") :])
        another = _AND_ANOTHER.match(text, match.end(1))
        listed = another is not None and another[1] != letter
        if ends and not (is_lower or listed or _NEGATED_AFTER.match(text, match.end(1))):
            return _Statement(0, _index(letter.upper(), choices))
    first = re.split(rf"\n|(?<=[{FULL_STOPS}!])\s|[。।۔,:;]|\s-+\s", text)[0].replace(_BOLD, "")
    for number, choice in enumerate(choices):
        if len(choice.strip()) > 1 and is_same(first, choice):
            return _Statement(0, number)
    return None


def _only_letter(text: str, count: int) -> int | None:
    """Index of the only letter of a choice that a text names and does not deny; None if it names several, or none."""
    named = rf"{_NOT_IN_WORD}([A-{chr(ord('A') + count - 1)}]){_ALONE}"
    letters = [match for match in re.finditer(named, text) if not _is_word(match[1], text, match.end())]
    if len({match[1] for match in letters}) != 1:
        return None
    denied = any(
        _is_negated_before(text, match.start()) or _NEGATED_AFTER.match(text, match.end())
        for match in letters[:50]
    )
    return None if denied else ord(letters[0][1]) - ord("A")


def _is_word(letter: str, text: str, end: int) -> bool:
    """Whether a capital is an article or a pronoun, as in "A dog" and "I think"."""
    if letter == "I":
        return _SAME_CASE_WORD.match(text, end) is not None
    return (
        letter in "AEOUY" and _SAME_CASE_WORD.match(text, end) is not None and bool(_ARTICLE.match(text, end))
    )


def _index(letter: str, choices: Sequence[str]) -> int | None:
    number = ord(letter) - ord("A")
    return number if number < len(choices) else None
