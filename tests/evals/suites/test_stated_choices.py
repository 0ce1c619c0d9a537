import pytest

from slimqwen.evals.suites.stated_choices import stated_choice, stated_texts

CHOICES = ["red", "blue", "green", "black"]


@pytest.mark.parametrize(
    ("response", "stated"),
    [
        ("答案是B", "B"),
        ("选B。", "B"),
        ("B：蓝色", "B"),
        ("答えはAではなくB", "B"),
        ("정답은 A가 아니라 B입니다", "B"),
        ("Ответ: С, потому что А меньше.", "C"),
        ("الإجابة الصحيحة هي C لأن A خطأ.", "C"),
        ("Die Antwort ist nicht A, sondern C.", "C"),
        ("La réponse est la C, car A et B sont trop petits.", "C"),
        ("A resposta correta é a letra C, não a A.", "C"),
        ("The answer is A or B.", "-"),
        ("It is either A or B.", "-"),
        ("The wrong answer is A. The right one is C.", "C"),
        ("If the answer were A, it would float. The answer is C.", "C"),
        ("C. The answer to B is unknown.", "C"),
        ("**B**\n\nMany people would pick D.", "B"),
        ("B。很多人会选D。", "B"),
        ("B. A common answer is D.", "B"),
        ("I think that is hard.", "-"),
        ("A dog is an animal.", "-"),
        ("C'est la vie", "-"),
        ("The answer is E, not B.", "-"),
        ("C - neither A nor B has oars.", "C"),
        ("\\boxed{\\text{(C) green}}", "C"),
        ("\\boxed{A, B}", "-"),
        ("The answer is green.", "C"),
        ("В) синий", "B"),
        ("В Москве небо синее, А не красное.", "-"),
        ("คำตอบไม่ใช่ A แต่เป็น C", "C"),
        ("सही उत्तर A नहीं बल्कि C है।", "C"),
        ("C\\u3002", "C"),
        ("A. red\nB. blue\nC. green\nD. black\n\nC", "C"),
        ("A. red\nB. blue\nC. green\nD. black", "-"),
        ("Answer: B\nWait, is the answer C?", "B"),
    ],
)
def test_the_stated_letter_counts_and_no_other(response, stated):
    number = stated_choice(response, CHOICES)
    assert ("-" if number is None else "ABCD"[number]) == stated


def test_the_texts_of_a_statement_end_with_its_sentence_or_its_reason():
    assert "42." in stated_texts("The answer is 42. It was not 43.")
    assert "42" in stated_texts("Answer: 42 because it is.")
    assert list(stated_texts("The answer is not 42.")) == list(stated_texts("It is 42.")) == []
