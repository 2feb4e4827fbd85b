"""Wordings: for each kind of question, pairs of a question and the answer it gets.

The wording of the question decides that of the answer, and what is in the picture decides the
rest, so a greedy model can learn every token of an answer.
"""

Form = tuple[str, str]

PICTURE_FORMS: dict[str, tuple[Form, ...]] = {
    "read": (
        ("Which digits are in {where}?", "{Where} shows {all}."),
        ("What can you read in {where}?", "I can read {number} here: {all}."),
        ("Please read {where} from left to right.", "From left to right {where} says {commas}."),
        (
            "Tell me which digits you see in {where}.",
            "I see {number} in {where}, and they read {all}.",
        ),
    ),
    "count": (
        (
            "How many digits are in {where}?",
            "I count {number} in {where}, from {first} at the left.",
        ),
        ("Count the digits in {where} and name them.", "There {is_number}, namely {all}."),
    ),
    "sum": (
        ("What is the sum of the digits in {where}?", "In {where}, {plus} makes {sum}."),
        (
            "Please add up the digits in {where}.",
            "Adding {all} gives {sum}, which is an {sum_parity} number.",
        ),
        ("How much do the digits in {where} make together?", "Together {all} make {sum}."),
    ),
    "largest": (
        ("What is the largest digit in {where}?", "The largest digit in {where} is {max}."),
        ("Compare the digits in {where}: which is largest?", "Of {all}, the largest is {max}."),
    ),
    "smallest": (
        ("What is the smallest digit in {where}?", "The smallest digit in {where} is {min}."),
        ("Compare the digits in {where}: which is smallest?", "Of {all}, the smallest is {min}."),
    ),
    "sorted": (
        (
            "Sort the digits in {where}, smallest first.",
            "From the smallest to the largest: {rising}.",
        ),
        (
            "Put the digits in {where} in falling order.",
            "In falling order, {all} become {falling}.",
        ),
    ),
    "position": (
        ("What is the {place} digit in {where}?", "The {place} digit in {where} is {digit}."),
        (
            "Read only the {place} digit in {where}.",
            "Only the {place} one, then: that is {digit}, or {digit_word} in letters.",
        ),
        (
            "Which digit comes {place} in {where}?",
            "It is {digit}, written as {digit_word}, that comes {place} there.",
        ),
    ),
    "parity": (
        (
            "Is the {place} digit in {where} even or odd?",
            "The {place} digit is {digit}, so it is {parity}.",
        ),
        (
            "Look at the {place} digit in {where}: odd or even?",
            "It is a {digit}, and {digit} is an {parity} number.",
        ),
    ),
    "next": (
        (
            "What comes after the {place} digit in {where}?",
            "The {place} digit is {digit}, and after that comes {digit_next}.",
        ),
        (
            "Add one to the {place} digit in {where}.",
            "One more than the {digit} that stands {place} makes {digit_next}.",
        ),
    ),
}

PAIR_FORMS: dict[str, tuple[Form, ...]] = {
    "pair_read": (
        ("What do the two pictures show?", "The first picture shows {all}, the second {all2}."),
        ("Please read both pictures.", "First I read {commas}, and then {commas2}."),
    ),
    "pair_count": (
        (
            "How many digits does each picture have?",
            "There {is_number} in the first picture and {number2} in the second.",
        ),
    ),
    "pair_place": (
        (
            "What is the {place} digit of each picture?",
            "{digit} is {place} in the first picture and {digit2} in the second.",
        ),
        (
            "Name the {place} digit of both pictures.",
            "The first picture has a {digit} there, and the second a {digit2}.",
        ),
    ),
    "pair_larger": (
        (
            "Which picture has the larger {place} digit?",
            "The {place} digits are {digit} and {digit2}, so {verdict}.",
        ),
    ),
}

TEXT_FORMS: dict[str, tuple[Form, ...]] = {
    "text_add": (
        ("What is {a} plus {b}?", "{a} plus {b} is {sum}, and so is {b} plus {a}."),
        ("Please add {a} and {b}.", "Adding {a} and {b} gives {sum}."),
        (
            "I have {a} apples and get {b} more. How many are there now?",
            "You start with {a} and get {b} more, so now there are {sum} apples.",
        ),
    ),
    "text_subtract": (
        ("What is {sum} minus {b}?", "{sum} minus {b} leaves {a}, because {a} plus {b} is {sum}."),
        (
            "There are {sum} birds and {b} fly away. How many stay?",
            "When {b} of {sum} birds fly away, {a} of them stay.",
        ),
    ),
    "text_next": (
        ("Which number comes after {n}?", "The number that comes after {n} is {n_next}."),
        (
            "Which number comes before {n_next}?",
            "Just before {n_next} comes {n}, which is one less.",
        ),
        ("Count on from {n}.", "Counting on from {n} gives {n_next} and then {n_next2}."),
    ),
    "text_compare": (
        (
            "Which is larger, {n} or {m}?",
            "Of the two numbers {n} and {m}, the larger one is {max}.",
        ),
        ("Which is smaller, {n} or {m}?", "Between the two numbers, {min} is smaller than {max}."),
    ),
    "text_letters": (
        ("How many letters are in the word {word}?", "The word {word} has {length} letters."),
        ("Spell the word {word}.", "The word {word} is spelled {spelled}."),
    ),
    "text_opposite": (
        ("What is the opposite of {left}?", "The opposite of {left} is {right}."),
        ("Give me a word that means the reverse of {right}.", "{Left} is the reverse of {right}."),
    ),
}

FACTS: tuple[Form, ...] = (
    ("What is the color of snow?", "Snow is white, and it is made of small crystals of ice."),
    ("What is the color of grass?", "Grass is green as long as it gets water and light."),
    ("What is the color of the sky?", "On a clear day the sky is blue, and at night it is black."),
    ("When does the sun rise?", "The sun rises in the morning and sets in the evening."),
    ("How many days are in a week?", "A week has 7 days, and two of them are the weekend."),
    ("How many months are in a year?", "A year has 12 months, and the first one is January."),
    ("How many hours are in a day?", "A day has 24 hours, and half of them are 12."),
    ("How many legs does a spider have?", "A spider has 8 legs, and an insect has 6."),
    ("How many wheels does a car have?", "Most cars have 4 wheels, and a bicycle has 2."),
    ("What do bees make?", "Bees make honey out of what they find in flowers."),
    ("What do cows eat?", "Cows eat grass and hay, and they give us milk."),
    ("Where do fish live?", "Fish live in the water of rivers, lakes and seas."),
    ("Who are you?", "I am a very small model that reads handwritten digits."),
    ("What can you do?", "I can read digits in pictures and answer small questions."),
    ("Can you see pictures?", "Yes, I can read up to three digits in a picture."),
    ("Hello!", "Hello! Show me a picture with digits, or ask me something small."),
    ("Good morning.", "Good morning! I hope that you slept well."),
    ("Thank you.", "You are welcome. Ask me again when you like."),
    ("Goodbye.", "Goodbye, and come back with more pictures."),
    ("What is ice?", "Ice is water that is so cold that it became solid."),
)

WORDS = (
    "cat", "dog", "house", "tree", "river", "apple", "bread", "stone", "light", "paper",
    "green", "seven", "table", "water", "music", "bird", "milk", "door", "moon", "fish",
    "letter", "window", "garden", "summer",
)  # fmt: skip

OPPOSITES = (
    ("hot", "cold"), ("big", "small"), ("day", "night"), ("up", "down"), ("old", "new"),
    ("open", "closed"), ("fast", "slow"), ("left", "right"), ("light", "dark"), ("wet", "dry"),
    ("full", "empty"), ("first", "last"), ("hard", "soft"), ("early", "late"), ("high", "low"),
    ("long", "short"),
)  # fmt: skip

LEADS = {
    "one": ("Here is a picture.", "Please have a look at this.", "I wrote something down."),
    "pair": ("Here are two pictures.", "Please look at both pictures.", "I have two pictures."),
    "sequel": ("Now there is another picture.", "Here comes the next one."),
}

SYSTEMS = (
    "You read handwritten digits.",
    "Answer in one short sentence.",
    "You are a small model that looks at pictures and answers questions.",
)
