// The built-in stories' rules. Written for this project.
//
// Wishes: short distinct words in near-uniform lists (much entropy per byte, quickly learned), no list with one word a prefix of
// another, and a little to remember: whether the hero is a king or a queen, and which plot the story follows. hero, thing and
// adj are in every story once, uniform, and of sizes that are multiples of 16: the split of stories.h rests on that.
#include "dataloader/stories_grammar.h"

namespace kinoe {
namespace {

constexpr RuleText kRules[] = {
    {"story", "{when} {hero} {feels}, and {she=hero} {plot}"},

    // Losing a thing, making one, finding one. The list a sentence ends with says which, and so what follows.
    {"plot",
     "{loses} {adj} {thing} {far}. {recovery}|"
     "{makes} {adj} {thing} for the {trade}. It {ends}, {thanks}|"
     "{finds} {adj} {thing} {near}. {surprise}"},
    {"loses", "lost|hid|left|forgot|dropped|buried|mislaid|threw"},
    {"recovery",
     "So {she=hero} {feels} for {number} {days}.|"
     "But {a_nature} {beast} {brings} it back.|"
     "{A_nature} {beast} {takes} it, and {she=hero} {feels}."},
    {"brings", "gave|sold|brought|threw|mailed|carried|kicked|dragged"},
    {"takes", "stole|took|ate|grabbed|licked|hid|sniffed|bit"},
    {"makes", "made|carved|painted|built|bought|mended|wove|cleaned"},
    {"ends", "broke|vanished|sank|rotted|melted|burnt|cracked|shone"},
    {"thanks",
     "and {she=hero} {feels} for {number} {days}.|so {she=hero} {gets} {number} {taste} {food}.|but "
     "{she=hero} {feels}."},
    {"gets", "got|won|lost|ate|sold|cooked|bought|paid"},
    {"finds", "found|spied|won|stole|dug up|noticed|picked up|touched"},
    {"surprise",
     "In it {feels} {a_nature} {beast}, so {she=hero} {feels}.|"
     "There {she=hero} {feels} for {number} {days}.|"
     "Then {she=hero} sold it for {number} {taste} {food}."},
    {"days", "days|weeks|hours|nights"},

    {"when", "At {hour}:{ten}{digit}|In 1{century}{digit}{digit}"},
    {"hour", "1|2|3|4|5|6|7|8|9"},
    {"ten", "0|1|2|3|4|5"},
    {"digit", "0|1|2|3|4|5|6|7|8|9"},
    {"century", "4|5|6|7|8|9"},
    {"number", "{tens}{digit}"},
    {"tens", "1|2|3|4|5|6|7|8|9"},

    // A title says what the pronouns will be.
    {"hero",
     "Queen Cora/f|Queen Dora/f|Queen Gwen/f|Queen Ida/f|Queen Lena/f|Queen Nora/f|Queen Rosa/f|Queen "
     "Zoe/f|King Emil/m|King Finn/m|King Hugo/m|King Jack/m|King Max/m|King Paul/m|King Vito/m|King Walt/m"},
    {"trade",
     "baker|cook|smith|tailor|miller|sailor|painter|potter|weaver|farmer|fisher|doctor|nurse|clown|piper|"
     "drummer"},
    {"thing", "axe|bell|boat|cup|doll|egg|flag|globe|hat|key|lamp|net|pipe|ring|urn|wheel"},
    {"adj",
     "a red|a blue|a green|a gold|a tiny|an old|an odd|an iron|an ivory|a new|a big|a fine|a thin|a long|a "
     "round|a heavy|"
     "a shiny|a dusty|a broken|a magic|a pretty|a wooden|a silver|a yellow|a purple|a plain|a rusty|a "
     "cheap|a dirty|"
     "a white|a black|a grey"},
    {"far",
     "in the woods|at the fair|on the hill|at the inn|by the river|in the valley|on the beach|at the "
     "market|by the pond|"
     "at the forge|on the island|in the garden|by the road|at the crossing|on the moor|in the field"},
    {"near",
     "under the bridge|near the well|behind the church|under the oak|near the harbour|behind the school|"
     "under the stairs|near the castle|behind the stable|under the hedge|near the tower|behind the shop|"
     "under the bed|near the gate|behind the barn|under the roof"},
    {"a_nature",
     "a sly|a young|a hungry|a lazy|a greedy|a kind|a fat|a brave|a wet|a bold|a clever|a proud|a quick|a "
     "shy|a merry|a noisy"},
    {"A_nature",
     "A sly|A young|A hungry|A lazy|A greedy|A kind|A fat|A brave|A wet|A bold|A clever|A proud|A quick|A "
     "shy|A merry|A noisy"},
    {"beast", "fox|goat|crow|wolf|bear|owl|hen|duck|goose|cat|dog|rat|mouse|pig|cow|mule"},
    {"taste", "hot|cold|sweet|sour|ripe|fresh|salty|dry|soft|round|green|brown|tasty|huge|spicy|raw"},
    {"food", "figs|plums|pears|nuts|buns|pies|tarts|eggs|beans|leeks|cakes|dates|limes|peas|rolls|grapes"},
    {"feels", "wept|slept|sang|laughed|danced|smiled|snored|shivered|whistled|sneezed|prayed|yawned"},
};

}  // namespace

std::span<const RuleText> story_rules() { return kRules; }

}  // namespace kinoe
