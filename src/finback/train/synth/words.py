"""The words that synthetic documents are made of, and which pairs of them training never sees together."""

from __future__ import annotations

import zlib

GIRLS = (
    "Ada Alma Anna Bella Carla Clara Cora Dina Edith Elsa Emma Fay Flora Greta Hanna Ida Ines Iris Jana Kira Lena Lily "
    "Lotta Lucy Maja Mara Mia Mina Nell Nina Nora Olga Paula Pia Rosa Ruth Sara Selma Stella Thea Tilda Uma Vera Wanda "
    "Yara Zoe"
).split()
BOYS = (
    "Abel Adam Alan Arlo Axel Ben Bruno Carl Colin Dan David Edgar Eli Emil Enzo Felix Finn Frank Fred Gus Hans Henry "
    "Hugo Ian Ivan Jack Jonas Karl Kurt Leo Liam Luis Marc Milo Nico Nils Oscar Otto Paul Pete Ralf Sam Sven Theo Tom "
    "Victor"
).split()
NAMES = tuple(GIRLS + BOYS)

ANIMALS = (
    "fox rabbit bear mouse frog badger goat duck hen cat dog squirrel hedgehog beaver turtle donkey sheep crow "
    "raccoon pony"
).split()
TRAITS = "clever kind brave quiet cheerful curious shy gentle lively patient busy friendly".split()
COLORS = "red blue green yellow purple white black brown pink gray".split()
OBJECTS = (
    "kite ring scarf drum lamp cup book ball whistle basket hat bell box boat key bag coat spoon comb mirror blanket "
    "rope vase clock candle coin puppet wheel jar flag"
).split()
PLACES = (
    "the river",
    "the old mill",
    "the market",
    "the forest",
    "the lake",
    "the hill",
    "the harbor",
    "the castle",
    "the farm",
    "the garden",
    "the bakery",
    "the railway station",
    "the lighthouse",
    "the meadow",
    "the village square",
    "the quarry",
    "the beach",
    "the orchard",
    "the windmill",
    "the library",
)
SPOTS = (
    "under a bench",
    "behind the barn",
    "next to a big rock",
    "under an oak tree",
    "beside the fence",
    "behind a bush",
    "in the tall grass",
    "under the stairs",
    "near the gate",
    "behind the woodpile",
    "under an old cart",
    "beside a small pond",
    "in a hollow log",
    "next to the well",
)
HIGH = ("in a tall tree", "on the roof", "on top of a wall", "on the church tower", "in the branches of an apple tree")
HUTS = ("behind a row of trees", "at the end of the path", "on a small hill", "at the edge of the woods", "by a stream")
SEATS = ("in the last row", "by the window", "in the corner", "on the front bench", "near the door")
FOODS = (
    "a pear",
    "a loaf of bread",
    "a plum cake",
    "a bag of nuts",
    "a pot of honey",
    "a cheese pie",
    "a bowl of cherries",
    "some pancakes",
    "a carrot cake",
    "a basket of berries",
    "some warm rolls",
    "a pumpkin pie",
)
GOODS = "apples carrots beans onions potatoes cherries nuts plums cabbages pears turnips berries".split()
TOOLS = (
    "a long stick",
    "a ladder",
    "a strong rope",
    "a big net",
    "a rake",
    "an iron hook",
    "a shovel",
    "a hammer",
    "a pair of tongs",
)
PLANTS = "sunflower pumpkin rosebush bean tomato cherry lily melon".split()
HOBBIES = ("the stars", "ships", "old songs", "painting", "trains", "wild animals", "chess", "kites", "far countries")
SKILLS = ("to swim", "to whistle", "to skate", "to ride a pony", "to juggle", "to row a boat", "to dance", "to ski")
SONGS = ('"The Green Hat"', '"Home by Nine"', '"Seven Geese"', '"Over the Sea"', '"My Old Boots"', '"The Moon Is Up"')
TUNES = "trumpet flute fiddle drum guitar horn".split()
WORK = ("swept the floor", "carried sacks", "picked apples", "washed windows", "fed the hens", "stacked boxes")
WEATHER = "windy cold rainy warm sunny foggy stormy snowy gray mild".split()
PARTS = "morning afternoon evening".split()
LATE = ("six o'clock", "nine o'clock", "midnight", "sunset", "noon", "ten o'clock")
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
FAMILY = "mother father grandmother grandfather uncle aunt sister brother".split()
LIMBS = "knee foot elbow hand arm nose".split()
SAD = "sad lonely worried unhappy afraid upset".split()
GLAD = ("happy", "glad", "proud", "full of joy", "very pleased", "content")
PETS = "Pip Dot Chip Tiny Bean Feather Speck Peep".split()
NUMBERS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty"
).split()


def a(words: str) -> str:
    """`words` with the indefinite article."""
    return ("an " if words[0] in "aeiou" else "a ") + words


def withheld(*parts: object) -> bool:
    """Whether a combination is kept from training: one in ten, decided by its words alone."""
    return zlib.crc32("|".join(map(str, parts)).encode()) % 10 == 0
