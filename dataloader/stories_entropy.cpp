// The grammar's entropy, length and variance, exactly.
//
// A frame is a story with all sentence structures chosen and the words still open: literals, word slots, and how often each
// slot's words come back. Within a frame -log p and the number of bytes are sums of independent terms, one a slot;
// over frames they are averaged with the frames' probabilities.
#include <cmath>

#include "dataloader/stories_grammar.h"
#include "kernels/common/check.h"

namespace kinoe {

struct Grammar::Frame {
  struct Slot {
    int rule = 0;
    std::vector<Item> repeats;
  };
  double probability = 1;
  double literal_bytes = 0;
  std::vector<Slot> slots;
};

void Grammar::add_frame(const Frame& frame, double rate, Moments& sum) const {
  double nats = -std::log(frame.probability);
  double bytes = frame.literal_bytes;
  double texts = 1;
  double variance = 0;
  for (const Frame::Slot& slot : frame.slots) {
    const Rule& rule = at(rules_, slot.rule);
    double slot_nats = 0, slot_bytes = 0, mean = 0, square = 0;
    for (size_t a = 0; a < rule.alternatives.size(); ++a) {
      const double p = static_cast<double>(rule.alternatives[a].weight) / rule.total_weight;
      auto length = static_cast<double>(rule.alternatives[a].items[0].text.size());
      for (const Item& item : slot.repeats)
        length += static_cast<double>(repeat_text(item, static_cast<int>(a)).size());
      slot_nats -= p * std::log(p);
      slot_bytes += p * length;
      const double value = -std::log(p) - rate * length;
      mean += p * value;
      square += p * value * value;
    }
    nats += slot_nats;
    bytes += slot_bytes;
    texts *= static_cast<double>(rule.alternatives.size());
    variance += square - mean * mean;
  }
  const double excess = nats - rate * bytes;
  sum.nats += frame.probability * nats;
  sum.bytes += frame.probability * bytes;
  sum.texts += texts;
  sum.variance += frame.probability * (variance + excess * excess);  // moments() takes off the squared mean
}

// `ahead` holds what is still to come of the story, the next item last.
void Grammar::add_frames(std::vector<Item> ahead, Frame frame, double rate, Moments& sum) const {
  while (!ahead.empty()) {
    const Item item = ahead.back();
    ahead.pop_back();
    if (item.kind == ItemKind::literal) {
      frame.literal_bytes += static_cast<double>(item.text.size());
    } else if (item.kind == ItemKind::repeat) {
      size_t slot = frame.slots.size();
      while (slot > 0 && frame.slots[slot - 1].rule != item.rule) --slot;
      CHECK(slot > 0, "grammar rule '", at(rules_, item.rule).name,
            "' is repeated before it was chosen from");
      frame.slots[slot - 1].repeats.push_back(item);
    } else if (at(rules_, item.rule).words) {
      frame.slots.push_back({item.rule, {}});
    } else {
      const Rule& rule = at(rules_, item.rule);
      for (const Alternative& alternative : rule.alternatives) {
        std::vector<Item> rest = ahead;
        rest.insert(rest.end(), alternative.items.rbegin(), alternative.items.rend());
        Frame branch = frame;
        branch.probability *= static_cast<double>(alternative.weight) / rule.total_weight;
        add_frames(std::move(rest), std::move(branch), rate, sum);
      }
      return;
    }
  }
  add_frame(frame, rate, sum);
}

Grammar::Moments Grammar::moments(double rate) const {
  Moments sum;
  add_frames({{ItemKind::choice, {}, 0}}, Frame{}, rate, sum);
  const double mean = sum.nats - rate * sum.bytes;
  sum.variance -= mean * mean;
  return sum;
}

}  // namespace kinoe
