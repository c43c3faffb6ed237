// The built-in stories' rules. Written for this project.
//
// Wishes: short distinct words in near-uniform lists (much entropy per byte, quickly learned), no list with one word a prefix of
// another, and names, objects and animals that come back so that a model must remember them. hero, trade and thing are
// in every story once, uniform, and of sizes that are multiples of 16: the split of stories.h rests on that.
#include "dataloader/stories_grammar.h"

namespace kinoe {
namespace {

constexpr RuleText kRules[] = {
    {"story", "{when} {hero} {plot}"},

    // Dropping a thing, making one, finding one; each list of verbs leads into its own plot.
    {"plot",
     "{loses} {adj} {thing}. The {=thing} {falls} {place}. {recovery}|"
     "{makes} {adj} {thing} for the {trade}. The {=thing} {ends}, {thanks}|"
     "{finds} {adj} {thing} {place}. {surprise}"},
    {"loses", "lost|hid|left|forgot|dropped|buried|mislaid|threw"},
    {"falls", "fell|rolled|slid|flew|sank|landed|got stuck|lay"},
    {"recovery",
     "So {=hero} {feels} for {number} {days}.|"
     "But {a_nature} {beast} {brings} it to {=hero}.|"
     "{A_nature} {beast} {takes} it, and {=hero} {feels}."},
    {"brings", "gave|sold|brought|threw|mailed|carried|showed|dragged"},
    {"takes", "stole|took|ate|grabbed|licked|kicked|sniffed|bit"},
    {"makes", "made|carved|painted|built|bought|mended|wove|cleaned"},
    {"ends", "broke|vanished|sank|rotted|melted|burnt|cracked|shone"},
    {"thanks", "and {=hero} {feels} for {number} {days}.|so {=hero} {gets} {number} {taste} {food}.|but {she=hero} {feels}."},
    {"gets", "got|won|lost|ate|sold|cooked|bought|paid"},
    {"finds", "found|spied|won|stole|dug up|noticed|picked up|touched"},
    {"surprise",
     "In it {feels} {a_nature} {beast}, so {=hero} {feels}.|"
     "For {number} {days} {=hero} {feels}.|"
     "So {=hero} sold it for {number} {taste} {food}."},
    {"days", "days|weeks|hours|nights"},

    {"when", "At {hour}:{ten}{digit}|In 1{century}{digit}{digit}"},
    {"hour", "1|2|3|4|5|6|7|8|9"},
    {"ten", "0|1|2|3|4|5"},
    {"digit", "0|1|2|3|4|5|6|7|8|9"},
    {"century", "4|5|6|7|8|9"},
    {"number", "{tens}{digit}"},
    {"tens", "1|2|3|4|5|6|7|8|9"},

    // No two begin with the same letter, and no sentence begins with one of theirs.
    {"hero",
     "Cora/f|Dora/f|Emil/m|Finn/m|Gwen/f|Hugo/m|Jack/m|Kate/f|Lena/f|Max/m|Nora/f|Paul/m|Rosa/f|Vito/m|Walt/m|Zoe/f"},
    {"trade",
     "baker|cook|smith|tailor|miller|sailor|painter|potter|weaver|farmer|fisher|doctor|nurse|clown|piper|drummer|"
     "cobbler|carter|dyer|mason|barber|brewer|tanner|glazier|hatter|porter|scribe|shepherd|teacher|fiddler|hunter|"
     "juggler"},
    {"thing",
     "axe|bell|boat|coin|cup|drum|doll|egg|fan|flag|globe|harp|hat|jug|kite|key|lamp|ladder|mask|map|net|oar|pan|pipe|"
     "quilt|ring|rope|sled|tent|urn|vase|wheel"},
    {"adj",
     "a red|a blue|a green|a gold|a tiny|an old|an odd|an iron|an ivory|a new|a big|a fine|a thin|a long|a round|a heavy|"
     "a shiny|a dusty|a broken|a magic|a pretty|a wooden|a silver|a yellow|a purple|a plain|a rusty|a cheap|a dirty|"
     "a white|a black|a grey"},
    {"place",
     "in the barn|by the mill|at the inn|on the hill|under the bridge|near the well|behind the church|in the woods|"
     "by the river|at the fair|on the roof|under the oak|near the harbour|behind the school|in the attic|by the gate|"
     "at the market|on the beach|under the stairs|near the castle|behind the stable|in the cellar|by the pond|"
     "at the forge|on the island|under the hedge|near the tower|behind the shop|in the garden|by the road|at the crossing|"
     "on the moor"},
    {"a_nature",
     "a sly|a young|a hungry|a lazy|a greedy|a kind|a fat|a brave|a wet|a bold|a clever|a proud|a quick|a shy|a merry|"
     "a noisy|an old|an angry|an idle|an ugly|a tired|a grim|a jolly|a rude"},
    {"A_nature",
     "A sly|A young|A hungry|A lazy|A greedy|A kind|A fat|A brave|A wet|A bold|A clever|A proud|A quick|A shy|A merry|"
     "A noisy|An old|An angry|An idle|An ugly|A tired|A grim|A jolly|A rude"},
    {"beast",
     "fox|goat|crow|wolf|bear|owl|hen|duck|goose|cat|dog|rat|mouse|pig|cow|mule|horse|toad|frog|newt|crab|swan|stork|hawk|"
     "mole|hare|deer|lynx|otter|badger|weasel|raven"},
    {"taste", "hot|cold|sweet|sour|ripe|fresh|salty|dry|soft|round|green|brown|tasty|huge|spicy|raw"},
    {"food",
     "figs|plums|pears|nuts|buns|pies|tarts|eggs|beans|leeks|cakes|dates|limes|peas|rolls|grapes|cherries|lemons|olives|"
     "onions|melons|carrots|muffins|apples|turnips|waffles|pickles|beets|kippers|oysters|shrimps|mangos"},
    {"feels", "wept|slept|sang|laughed|danced|smiled|snored|shivered|whistled|sneezed|prayed|yawned"},
};

}  // namespace

std::span<const RuleText> story_rules() { return kRules; }

}  // namespace kinoe
