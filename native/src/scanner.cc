#include "scanner.h"

#include <stdexcept>

namespace dagserve {

Scanner::Scanner(std::string_view section) {
  struct Head {
    std::uint32_t states, columns;
  };
  const auto& head = *reinterpret_cast<const Head*>(section.data());
  const std::size_t transitions = section.size() < sizeof(Head)
                                      ? section.size()
                                      : (std::size_t{head.states} * head.columns * sizeof(std::uint16_t) + 3) / 4 * 4;
  if (section.size() < sizeof(Head) + transitions + TwoLevel<std::uint8_t>::kBlocks * sizeof(std::uint16_t))
    throw std::invalid_argument("tokenizer: a scanner is cut short; compile the manifest again");
  columns_ = head.columns;
  transitions_ = reinterpret_cast<const std::uint16_t*>(section.data() + sizeof(Head));
  classes_ = TwoLevel<std::uint8_t>(section.data() + sizeof(Head) + transitions);
  ascii_.resize(std::size_t{head.states} * kAscii);
  for (std::uint32_t state = 0; state < head.states; ++state)
    for (std::uint32_t byte = 0; byte < kAscii; ++byte)
      ascii_[state * kAscii + byte] = expanded(transitions_[state * columns_ + classes_[byte]]);
}

}  // namespace dagserve
