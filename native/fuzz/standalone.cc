// Drives a fuzz target without libFuzzer: seeds, and random changes of them, for a number of seconds.
//
//   target SECONDS [SEED_FILE...]
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace {

void change(std::string& text, std::mt19937_64& random) {
  static const std::string kPieces[] = {"\"",   "\\",           "{",    "}",          "[",  "]",       ",",
                                        ":",    "null",         "true", "1e9",        "-",  "\\ud800", "\\u0000",
                                        "\xff", "\xed\xa0\x80", "日",   "\"items\":", "0.5"};
  const std::size_t at = text.empty() ? 0 : random() % text.size();
  switch (random() % 5) {
    case 0:
      if (!text.empty()) text[at] = static_cast<char>(random());
      break;
    case 1:
      text.insert(at, kPieces[random() % std::size(kPieces)]);
      break;
    case 2:
      text.erase(at, random() % 8);
      break;
    case 3:
      text.insert(at, text.substr(random() % (text.size() + 1), random() % 16));
      break;
    default:
      text.resize(random() % (text.size() + 16), static_cast<char>(random()));
  }
}

}  // namespace

int main(int count, char** arguments) {
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + std::chrono::duration<double>(count > 1 ? std::atof(arguments[1]) : 1);
  std::vector<std::string> seeds = {""};
  for (int i = 2; i < count; ++i) {
    std::ifstream file(arguments[i], std::ios::binary);
    seeds.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  std::mt19937_64 random(1);
  long runs = 0;
  for (; Clock::now() < end; ++runs) {
    std::string text = seeds[random() % seeds.size()];
    for (std::uint64_t n = random() % 8; n > 0; --n) change(text, random);
    LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(text.data()), text.size());
  }
  std::printf("%ld inputs\n", runs);
}
