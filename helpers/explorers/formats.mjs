// The arithmetic of small floating-point formats: 8, 6 and 4 bits, bfloat16 and float16.
//
// A format is data, the fields of `Format` in helpers/numerics/number_formats.py, which counts them from ml_dtypes' codes:
// {name, bits, signed, exponent_bits, mantissa_bits, bias, largest_code, inf_code, nan_code, ...}. A code is a whole
// number of `bits` bits: sign, exponent, mantissa. Its magnitude is the code without the sign bit; magnitudes up to
// `largest_code` are finite, and grow with their value. tests/helpers/test_explorers_numbers.py compares all of this with
// ml_dtypes.

/** The sign bit of a format's codes; 0 for a format without a sign. */
export function signBit(format) {
  return format.signed ? 2 ** (format.bits - 1) : 0;
}

const hasSubnormals = format => format.mantissa_bits > 0;
// the exponent of the smallest normal number
const leastExponent = format => (hasSubnormals(format) ? 1 : 0) - format.bias;

/** The parts of a code: sign, exponent and mantissa as whole numbers. */
export function fields(format, code) {
  const sign = code & signBit(format) ? 1 : 0;
  const magnitude = code & ~signBit(format);
  const steps = 2 ** format.mantissa_bits;
  return { sign, magnitude, exponent: Math.floor(magnitude / steps), mantissa: magnitude % steps };
}

/** The number that a code stands for: finite, infinite or NaN. */
export function decode(format, code) {
  const { sign, magnitude, exponent, mantissa } = fields(format, code);
  if (code === format.nan_code) return NaN;
  if (magnitude > format.largest_code) return magnitude === format.inf_code ? (sign ? -Infinity : Infinity) : NaN;
  const fraction = mantissa / 2 ** format.mantissa_bits;
  const isSubnormal = exponent === 0 && hasSubnormals(format);
  const size = isSubnormal
    ? fraction * 2 ** leastExponent(format)
    : (1 + fraction) * 2 ** (exponent - format.bias);
  return sign ? -size : size;
}

/** The largest finite number of a format. */
export const largest = format => decode(format, format.largest_code);

/** The smallest positive number of a format. */
export const smallest = format => decode(format, hasSubnormals(format) ? 1 : 0);

/** The finite numbers of a format lie between these two. */
export const range = format => [format.signed ? -largest(format) : smallest(format), largest(format)];

function roundHalfToEven(x) {
  const down = Math.floor(x);
  const rest = x - down;
  if (rest !== 0.5) return rest < 0.5 ? down : down + 1;
  return down % 2 === 0 ? down : down + 1;
}

/** floor(log2(x)) of a positive, finite double, exactly: Math.log2 may round up to the next whole number. */
function exponentOf(x) {
  let exponent = Math.floor(Math.log2(x));
  if (2 ** exponent > x) exponent -= 1;
  if (2 ** (exponent + 1) <= x) exponent += 1;
  return exponent;
}

/** The magnitude of a positive number rounded to nearest even, as if the format went on beyond its largest number. */
function roundedMagnitude(format, size) {
  const exponent = Math.max(exponentOf(size), leastExponent(format));
  const inSteps = roundHalfToEven(size / 2 ** (exponent - format.mantissa_bits));
  if (!hasSubnormals(format)) return exponent + format.bias + Math.max(inSteps, 1) - 1;
  return (exponent - leastExponent(format)) * 2 ** format.mantissa_bits + inSteps;
}

/** The code of NaN, or what a conversion stores in its place: a format of 6 or 4 bits has none, and stores -0. */
export function nanCode(format) {
  return format.nan_code ?? signBit(format);
}

/** The code of zero with a sign; some formats have no -0. */
function zeroCode(format, isNegative) {
  return isNegative && format.negative_zero ? signBit(format) : 0;
}

/**
 * The code of x, rounded to nearest even, as a cast does it: beyond the largest number a format gives infinity, NaN or,
 * where it has neither, its largest number. With `saturate`, x is clamped to the finite range first; NaN stays NaN.
 */
export function encode(format, x, saturate = false) {
  if (Number.isNaN(x)) return nanCode(format);
  const isNegative = x < 0 || Object.is(x, -0);
  // a format without a sign begins above zero: clamped, all that is below it becomes its smallest number
  if (!format.signed && x <= 0) return saturate ? 0 : nanCode(format);
  if (x === 0) return zeroCode(format, isNegative);
  const size = Math.abs(x);
  const sign = isNegative ? signBit(format) : 0;
  if (saturate && size > largest(format)) return sign + format.largest_code;
  const magnitude = size === Infinity ? Infinity : roundedMagnitude(format, size);
  if (magnitude > format.largest_code) return overflowCode(format, sign);
  return magnitude === 0 && format.signed ? zeroCode(format, isNegative) : sign + magnitude;
}

function overflowCode(format, sign) {
  if (format.inf_code !== null) return sign + format.inf_code;
  if (format.nan_code === null) return sign + format.largest_code;
  // where NaN has the code of -0, it has no sign
  return format.nan_code === signBit(format) ? format.nan_code : sign + format.nan_code;
}

/** The representable numbers around x: [largest one that is <= x, smallest one that is >= x], in the finite range. */
export function neighbours(format, x) {
  const [least, most] = range(format);
  if (Number.isNaN(x)) return [NaN, NaN];
  if (x >= most) return [most, most];
  if (x <= least) return [least, least];
  const near = decode(format, encode(format, x, true)) + 0; // of two zeros the one without a sign
  if (near === x) return [near, near];
  return near < x ? [near, step(format, near, 1)] : [step(format, near, -1), near];
}

/** The next representable number above (direction 1) or below (-1) a representable one. */
export function step(format, value, direction) {
  const index = indexOf(format, value) + direction;
  return atIndex(format, index);
}

/** Where a representable number stands: 0 for zero, k for the k-th positive number, -k for the k-th negative one. */
export function indexOf(format, value) {
  const magnitude = encode(format, Math.abs(value), true) & ~signBit(format);
  return value < 0 ? -magnitude : magnitude;
}

/** The number at an index of `indexOf`. */
export function atIndex(format, index) {
  const size = decode(format, Math.min(Math.abs(index), format.largest_code));
  return index < 0 ? -size : size;
}

/** What becomes of a value on its way into a format and back: value / scale is clamped or not, rounded, multiplied. */
export function round(format, value, scale = 1, saturate = true) {
  const target = value / scale;
  const code = encode(format, target, saturate);
  const decoded = decode(format, code);
  const dequantized = decoded * scale;
  const [below, above] = neighbours(format, target);
  const error = Object.is(dequantized, value) || dequantized === value ? 0 : Math.abs(dequantized - value);
  return {
    target,
    code,
    decoded,
    dequantized,
    below,
    above,
    error,
    relative: value === 0 ? NaN : error / Math.abs(value),
    unclamped: decode(format, encode(format, target)),
    isBeyond: target > range(format)[1] || target < range(format)[0],
    isTie: below !== above && target - below === above - target,
  };
}

/** A code as its fields' bits: "0 1111 110". */
export function bitsOf(format, code) {
  const text = code.toString(2).padStart(format.bits, "0");
  const afterSign = format.signed ? 1 : 0;
  const afterExponent = afterSign + format.exponent_bits;
  return [text.slice(0, afterSign), text.slice(afterSign, afterExponent), text.slice(afterExponent)]
    .filter(part => part)
    .join(" ");
}

/** A code as hexadecimal digits: "0x7E". */
export function hexOf(format, code) {
  return "0x" + code.toString(16).toUpperCase().padStart(Math.ceil(format.bits / 4), "0");
}

/** How a block's scale is rounded to a power of two. */
export const ROUNDINGS = ["up", "down", "nearest"];

/**
 * The exponent of the scale, a power of two, that a block of this amax gets: amax over the format's largest number,
 * rounded "up" so that nothing is above the largest, to the "nearest", or "down" to that of the largest power of two, as
 * the Microscaling specification has it. The same as `to_blocks` of helpers/numerics/microscaling.py.
 */
export function blockExponent(format, amax, rounding) {
  if (!(amax > 0)) return 0;
  const most = largest(format);
  if (rounding === "down") return clampExponent(exponentOf(amax) - exponentOf(most));
  // as float32 divides
  const ratio = Math.fround(Math.fround(amax) / Math.fround(most));
  const exponent = ratio > 0 ? exponentOf(ratio) : -149;
  if (rounding === "up") return clampExponent(2 ** exponent === ratio ? exponent : exponent + 1);
  // nearest by ratio: from the square root of 2 on it is the next power
  return clampExponent(ratio / 2 ** exponent > 2 * Math.fround(Math.SQRT1_2) ? exponent + 1 : exponent);
}

const clampExponent = exponent => Math.min(Math.max(exponent, -127), 127);

/** A block of numbers with one scale, a power of two: {exponent, amax, rounded: what became of each number}. */
export function roundBlock(format, values, rounding = "up") {
  const amax = values.reduce((most, value) => Math.max(most, Math.abs(value)), 0);
  const exponent = blockExponent(format, amax, rounding);
  return { exponent, amax, rounded: values.map(value => round(format, value, 2 ** exponent)) };
}
