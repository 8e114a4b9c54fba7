#include <simdjson.h>

#include <algorithm>

#include "dagserve/cpu_node.h"
#include "dagserve/node.h"

namespace dagserve {
namespace {

using Json = simdjson::dom::element;

template <class T>
T take(simdjson::simdjson_result<T> result, const std::string& what) {
  T value;
  if (std::move(result).get(value))
    throw std::invalid_argument("node option " + what + " has a type nodes do not take");
  return value;
}

Segment segment_of(Json json, const std::vector<std::string>& ports) {
  Segment segment;
  std::string_view text;
  if (json["literal"].get_string().get(text) == simdjson::SUCCESS) {
    segment.literal = text;
    return segment;
  }
  const auto found = std::ranges::find(ports, take(json["field"].get_string(), "template"));
  if (found == ports.end()) throw std::invalid_argument("a template names a field that is not an input");
  segment.input = static_cast<int>(found - ports.begin());
  return segment;
}

Value list_of(simdjson::dom::array list, const std::string& key, const std::vector<std::string>& ports) {
  if (list.size() > 0 && list.at(0).is_string()) {
    std::vector<std::string> texts;
    for (Json item : list) texts.emplace_back(take(item.get_string(), key));
    return texts;
  }
  if (list.size() > 0 && list.at(0).is_object()) {
    std::vector<Segment> segments;
    for (Json item : list) segments.push_back(segment_of(item, ports));
    return segments;
  }
  std::vector<std::int64_t> numbers;
  for (Json item : list) numbers.push_back(take(item.get_int64(), key));
  return numbers;
}

Value value_of(Json json, const std::string& key, const std::vector<std::string>& ports) {
  switch (json.type()) {
    case simdjson::dom::element_type::BOOL:
      return std::int64_t{take(json.get_bool(), key)};
    case simdjson::dom::element_type::INT64:
      return take(json.get_int64(), key);
    case simdjson::dom::element_type::DOUBLE:
      return take(json.get_double(), key);
    case simdjson::dom::element_type::STRING:
      return std::string(take(json.get_string(), key));
    case simdjson::dom::element_type::ARRAY:
      return list_of(take(json.get_array(), key), key, ports);
    default:
      throw std::invalid_argument("node option " + key + " has a type nodes do not take");
  }
}

void add_ports(const dagserve_port* ports, std::size_t count, std::vector<std::string>& names,
               std::vector<Tensor>& bounds) {
  for (std::size_t i = 0; i < count; ++i) {
    names.emplace_back(ports[i].name);
    bounds.push_back(std::bit_cast<Tensor>(ports[i].bound));
  }
}

}  // namespace

Config::Config(const dagserve_config& config) : root(config.root) {
  add_ports(config.inputs, config.input_count, inputs, input_bounds);
  add_ports(config.outputs, config.output_count, outputs, output_bounds);
  simdjson::dom::parser parser;
  simdjson::dom::object options;
  if (parser.parse(std::string_view(config.options)).get_object().get(options))
    throw std::invalid_argument("the node's options are not a JSON object");
  for (auto [key, value] : options)
    if (!value.is_null()) values.emplace_back(key, value_of(value, std::string(key), inputs));
}

}  // namespace dagserve
