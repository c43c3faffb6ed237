// The built-in stories' rules. Written for this project.
//
// Wishes: short distinct words in near-uniform lists (much entropy per byte, quickly learned), no list with one word a prefix of
// another, and names, objects and animals that come back so that a model must remember them. hero, trade and thing are
// in every story once, uniform, and of sizes that are multiples of 16: the split of stories.h rests on that.
#include "dataloader/stories_grammar.h"

namespace kinoe {
namespace {

constexpr RuleText kRules[] = {
    {"story", "{when} {hero} the {trade} {plot}"},
    {"when", "At {hour}:{ten}{digit}|In 1{century}{digit}{digit}|On {month} {day}"},
    {"hour", "1|2|3|4|5|6|7|8|9"},
    {"ten", "0|1|2|3|4|5"},
    {"digit", "0|1|2|3|4|5|6|7|8|9"},
    {"century", "4|5|6|7|8|9"},
    {"month", "March|April|May|June|July|August"},
    {"day", "10|11|12|13|14|15|16|17|18|19|20|21|22|23|24|25|26|27|28|29"},
    {"number", "{tens}{digit}"},
    {"tens", "1|2|3|4|5|6|7|8|9"},
    {"hero",
     "Ada/f|Bea/f|Cora/f|Dora/f|Edna/f|Faye/f|Gwen/f|Hana/f|Iris/f|Jane/f|Kate/f|Lena/f|Maud/f|Nora/f|Opal/"
     "f|Pia/f|"
     "Rosa/f|Suki/f|Tess/f|Uma/f|Vera/f|Wren/f|Yara/f|Zoe/f|"
     "Abe/m|Boris/m|Cyril/m|Dirk/m|Egon/m|Finn/m|Gus/m|Hugo/m|Igor/m|Jack/m|Karl/m|Leo/m|Max/m|Nils/m|Omar/"
     "m|Paul/m|"
     "Ralf/m|Sven/m|Tom/m|Ugo/m|Vito/m|Walt/m|Yuri/m|Zeno/m"},
    {"trade",
     "baker|cook|smith|tailor|miller|sailor|painter|potter|weaver|farmer|fisher|doctor|nurse|clown|piper|"
     "drummer|"
     "cobbler|carter|dyer|mason|barber|brewer|tanner|glazier|hatter|porter|scribe|shepherd|teacher|fiddler|"
     "hunter|"
     "juggler"},
    {"thing",
     "kite|drum|bell|ring|harp|coin|boat|lamp|vase|sled|doll|flag|pipe|horn|book|clock|comb|fan|hat|jug|key|"
     "map|mug|pan|"
     "quilt|rope|saw|tent|urn|axe|bow|cup|dish|egg|flute|glove|jar|knife|ladder|mask|net|oar|plate|robe|shoe|"
     "vest|wheel|"
     "brush"},
    {"adj",
     "a red|a blue|a green|a gold|a tiny|an old|an odd|an iron|an ivory|a new|a big|a fine|a thin|a long|a "
     "round|a heavy|"
     "a shiny|a dusty|a broken|a magic|a pretty|a wooden|a silver|a yellow|a purple|a plain|a rusty|a "
     "cheap|a dirty|"
     "a white|a black|a grey"},
    {"place",
     "in the barn|by the mill|at the inn|on the hill|under the bridge|near the well|behind the church|in the "
     "woods|"
     "by the river|at the fair|on the roof|under the oak|near the harbour|behind the school|in the attic|by "
     "the gate|"
     "at the market|on the beach|under the stairs|near the castle|behind the stable|in the cellar|by the "
     "pond|"
     "at the forge|on the island|under the hedge|near the tower|behind the shop|in the garden|by the road|at "
     "the crossing|"
     "on the moor"},
    {"Beast_adj",
     "A sly|A young|A hungry|A lazy|A greedy|A kind|A fat|A brave|A wet|A bold|A clever|A proud|A quick|A "
     "shy|A merry|"
     "A noisy|An old|An angry|An idle|An ugly|A tired|A grim|A jolly|A rude"},
    {"beast",
     "fox|goat|crow|wolf|bear|owl|hen|duck|goose|cat|dog|rat|mouse|pig|cow|mule|horse|toad|frog|newt|crab|"
     "swan|stork|hawk|"
     "mole|hare|deer|lynx|otter|badger|weasel|raven"},
    {"taste", "hot|cold|sweet|sour|ripe|fresh|salty|dry|soft|round|green|brown|tasty|huge|spicy|raw"},
    {"food",
     "figs|plums|pears|nuts|buns|pies|tarts|eggs|beans|leeks|cakes|dates|limes|peas|rolls|grapes|cherries|"
     "lemons|olives|"
     "onions|melons|carrots|muffins|apples|turnips|waffles|pickles|beets|kippers|oysters|shrimps|mangos"},
    {"friend",
     "Anna/f|Bella/f|Clara/f|Daisy/f|Emma/f|Flora/f|Greta/f|Helga/f|Ingrid/f|Judith/f|Klara/f|Lotte/f|Mina/"
     "f|Nelly/f|"
     "Olga/f|Paula/f|Adam/m|Bruno/m|Caleb/m|David/m|Ernst/m|Franz/m|Georg/m|Henry/m|Ivan/m|Jonas/m|Kurt/"
     "m|Lukas/m|"
     "Moritz/m|Noah/m|Oskar/m|Peter/m"},
    {"feels", "wept|slept|sang|laughed|danced|smiled|snored|shivered|whistled|sneezed|prayed|yawned"},

    {"plot",
     "{loses} {adj} {thing} {place}. {Beast_adj} {beast} {takes} it. {recovery}|"
     "{makes} {adj} {thing} for {friend} the {trade}. {thanks}|"
     "{gets} {adj} {thing} {place}. {surprise}"},
    {"loses", "lost|hid|left|forgot|dropped|buried|mislaid|threw"},
    {"takes", "stole|took|ate|grabbed|licked|kicked|sniffed|bit"},
    {"recovery",
     "So {=hero} {gives} it {number} {taste} {food} for the {=thing}.|"
     "But {=hero} {tricks} the {=beast} {place} and got the {=thing} back.|"
     "Poor {=hero} {feels} for {number} {days} until the {=beast} gave back the {=thing}."},
    {"gives", "paid|gave|fed|sold|threw"},
    {"tricks", "caught|tricked|met|chased|stopped|scared|begged|kissed"},
    {"days", "days|weeks|hours|nights"},
    {"makes", "made|carved|painted|built|found|bought|mended|fetched"},
    {"thanks",
     "So {=friend} {feels} and gave {=hero} {number} {taste} {food}.|"
     "But {=friend} {breaks} the {=thing}, and {=hero} {feels} {place}.|"
     "For the {=thing} {she=friend} gave {=hero} {number} {taste} {food}."},
    {"breaks", "broke|lost|burnt|sold|hated|bent|sank|spoilt"},
    {"gets", "saw|spied|won|stole|dug up|noticed|picked up|touched"},
    {"surprise",
     "In it {feels} {a_beast_adj} {beast} with {number} {food}. {=hero} kept the {=beast}.|"
     "But it was the {=thing} of {friend} the {trade}, who {feels} and gave {him=hero} {number} {food}."},
    {"a_beast_adj",
     "a sly|a young|a hungry|a lazy|a greedy|a kind|a fat|a brave|a wet|a bold|a clever|a proud|a quick|a "
     "shy|a merry|"
     "a noisy|an old|an angry|an idle|an ugly|a tired|a grim|a jolly|a rude"},
};

}  // namespace

std::span<const RuleText> story_rules() { return kRules; }

}  // namespace kinoe
