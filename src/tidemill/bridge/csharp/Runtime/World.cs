using System;
using System.Collections.Generic;
using System.Threading;

namespace Tidemill
{
    /// <summary>Chooses the actions of one decision where no trainer is connected.</summary>
    public delegate void Heuristic(Decision decision);

    /// <summary>Is told each action as it arrives; called by <see cref="Bridge.Exchange"/> on its thread.</summary>
    public interface IActuator
    {
        void Act(ActionEvent action);
    }

    /// <summary>
    /// A group of agents with observations and actions of equal shapes. Decisions may be requested from many threads at once; what reads or changes the
    /// whole world (<see cref="Bridge.Exchange"/>, <see cref="Actions"/>) is called while no thread requests anything.
    /// </summary>
    public sealed class World
    {
        internal readonly Rows Decisions;
        internal readonly Rows Ends;
        internal readonly float[] ContinuousActions;
        internal readonly int[] DiscreteActions;
        internal readonly int[] ObservationSizes;
        internal readonly int[] BranchStarts;
        internal readonly int MaskSize;
        internal int Exchanges; // requests made before the last one cannot be changed any more
        private readonly int[][] observationShapes;
        private readonly int[] branches;
        private readonly int[] actingAgents;
        private int requested;
        private int acting;

        /// <param name="name">1 to 63 ASCII characters; what the trainer calls the group.</param>
        /// <param name="maxAgents">Decisions and ended episodes between two exchanges, at most.</param>
        /// <param name="observationShapes">A shape of one to three sizes per observation.</param>
        /// <param name="continuousSize">Continuous actions of a decision.</param>
        /// <param name="branches">Sizes of the discrete branches.</param>
        public World(string name, int maxAgents, int[][] observationShapes, int continuousSize, params int[] branches)
        {
            CheckName(name);
            Require(maxAgents >= 1, name, "maxAgents is " + maxAgents + "; a world has room for one agent at least");
            Require(observationShapes != null && branches != null, name, "observationShapes and branches may be empty, not null");
            Require(continuousSize >= 0, name, "continuousSize is " + continuousSize);
            Name = name;
            MaxAgents = maxAgents;
            ContinuousSize = continuousSize;
            this.branches = (int[])branches.Clone();
            this.observationShapes = new int[observationShapes.Length][];
            ObservationSizes = new int[observationShapes.Length];
            BranchStarts = new int[branches.Length];
            long floats = 0;
            for (int k = 0; k < observationShapes.Length; k++)
            {
                ObservationSizes[k] = SizeOf(name, k, observationShapes[k]);
                this.observationShapes[k] = (int[])observationShapes[k].Clone();
                floats += ObservationSizes[k];
            }
            long choices = 0;
            for (int b = 0; b < branches.Length; b++)
            {
                Require(branches[b] >= 1, name, "branch " + b + " has " + branches[b] + " actions; it needs one at least");
                BranchStarts[b] = (int)Math.Min(choices, int.MaxValue);
                choices += branches[b];
            }
            long rowSize = 8 * floats + 64 + 2 * choices + 4L * continuousSize + 4L * branches.Length;
            Require(rowSize <= (int.MaxValue - 65536) / maxAgents, name, "it would take over 2 GiB of shared memory; fewer agents or smaller observations");
            MaskSize = (int)choices;
            Decisions = new Rows(maxAgents, ObservationSizes, MaskSize);
            Ends = new Rows(maxAgents, ObservationSizes, 0);
            ContinuousActions = new float[maxAgents * continuousSize];
            DiscreteActions = new int[maxAgents * branches.Length];
            actingAgents = new int[maxAgents];
        }

        public string Name { get; }

        /// <summary>Decisions and ended episodes that fit between two exchanges.</summary>
        public int MaxAgents { get; }

        public int ContinuousSize { get; }

        public int ObservationCount { get { return ObservationSizes.Length; } }

        public int BranchCount { get { return branches.Length; } }

        /// <summary>Who decides without a trainer; nobody (null) leaves all actions zero.</summary>
        public Heuristic Heuristic { get; set; }

        /// <summary>Told each action as it arrives, in no particular order.</summary>
        public IActuator Actuator { get; set; }

        /// <summary>The shape of observation `k`.</summary>
        public int[] ObservationShape(int k)
        {
            return (int[])observationShapes[k].Clone();
        }

        /// <summary>The number of actions of a branch.</summary>
        public int BranchSize(int branch)
        {
            return branches[branch];
        }

        /// <summary>
        /// Ask for an action of this agent; what is not set of the request is zero, and no action is forbidden. Safe from many threads at once. One request
        /// per agent between two exchanges.
        /// </summary>
        /// <exception cref="BridgeException">More requests than the world has room for.</exception>
        public Request RequestDecision(int agentId)
        {
            return NewRequest(Decisions, agentId, 0);
        }

        /// <summary>The agent's episode has ended: set its last reward and observation on what this returns. Its id may come again in a later exchange.</summary>
        public Request EndEpisode(int agentId)
        {
            return NewRequest(Ends, agentId, 0);
        }

        /// <summary>The agent's episode was broken off (a limit of steps, not an end of its own): set its last reward and observation.</summary>
        public Request InterruptEpisode(int agentId)
        {
            return NewRequest(Ends, agentId, 1);
        }

        /// <summary>The actions that the last exchange brought, one for each decision requested before it; they hold until the next.</summary>
        public IEnumerable<ActionEvent> Actions
        {
            get
            {
                for (int row = 0; row < acting; row++)
                {
                    yield return new ActionEvent(this, actingAgents[row], row);
                }
            }
        }

        /// <summary>How many <see cref="Actions"/> there are.</summary>
        public int ActionCount { get { return acting; } }

        /// <summary>The action of a row from 0 to <see cref="ActionCount"/> - 1.</summary>
        public ActionEvent Action(int row)
        {
            if (row < 0 || row >= acting)
            {
                throw new ArgumentOutOfRangeException("row", row, "The world '" + Name + "' has " + acting + " actions.");
            }
            return new ActionEvent(this, actingAgents[row], row);
        }

        internal bool HasRequests { get { return Decisions.Count + Ends.Count > 0; } }

        private Request NewRequest(Rows rows, int agentId, byte interrupted)
        {
            if (Interlocked.Increment(ref requested) > MaxAgents)
            {
                Interlocked.Decrement(ref requested);
                throw new BridgeException("The world '" + Name + "' has room for " + MaxAgents + " agents between two exchanges, ended ones included, and one more was requested (agent "
                    + agentId + "). Give it a larger maxAgents, or ask for an ended agent's next episode after the exchange.");
            }
            int row = rows.Take();
            rows.Begin(row, agentId, interrupted);
            return new Request(this, rows, row);
        }

        /// <summary>Forget what was requested, and the actions.</summary>
        internal void Drop()
        {
            acting = 0;
            DropRequests();
        }

        private void DropRequests()
        {
            Decisions.Clear();
            Ends.Clear();
            requested = 0;
            Exchanges++;
        }

        /// <summary>The actions of all requested decisions are in place: tell the actuator, and begin anew.</summary>
        internal void ActionsArrived()
        {
            acting = Decisions.Count;
            Array.Copy(Decisions.Ids, actingAgents, acting);
            DropRequests();
            if (Actuator != null)
            {
                for (int row = 0; row < acting; row++)
                {
                    Actuator.Act(new ActionEvent(this, actingAgents[row], row));
                }
            }
        }

        /// <summary>Let the heuristic choose all actions.</summary>
        internal void Decide()
        {
            Array.Clear(ContinuousActions, 0, Decisions.Count * ContinuousSize);
            Array.Clear(DiscreteActions, 0, Decisions.Count * branches.Length);
            if (Heuristic != null)
            {
                for (int row = 0; row < Decisions.Count; row++)
                {
                    Heuristic(new Decision(this, row));
                }
            }
            ActionsArrived();
        }

        private static void CheckName(string name)
        {
            bool good = name != null && name.Length >= 1 && name.Length <= Layout.MaxName;
            for (int i = 0; good && i < name.Length; i++)
            {
                good = name[i] >= ' ' && name[i] <= '~';
            }
            if (!good)
            {
                throw new BridgeException("The world's name '" + name + "' should have 1 to " + Layout.MaxName + " ASCII characters.");
            }
        }

        private static int SizeOf(string name, int k, int[] shape)
        {
            Require(shape != null && shape.Length >= 1 && shape.Length <= 3, name, "observation " + k + " should have one to three sizes");
            long size = 1;
            foreach (int length in shape)
            {
                Require(length >= 1, name, "a size of observation " + k + " is " + length + "; it should be 1 at least");
                size *= length;
                Require(size < int.MaxValue, name, "observation " + k + " is too large");
            }
            return (int)size;
        }

        private static void Require(bool condition, string name, string message)
        {
            if (!condition)
            {
                throw new BridgeException("The world '" + name + "': " + message + ".");
            }
        }
    }
}
